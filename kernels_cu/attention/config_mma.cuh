#pragma once
#include <attention/mask_softmax_mma.cuh>
#include <tile/copy_async.cuh>
#include <tile/tf32.cuh>

// Constants of a tensor-core kernel, from its specification, and the layouts of its operands in shared memory, with the
// names of FlashAttention-2 (arXiv 2307.08691).
namespace cuflash {

using Element = Config::Element;
constexpr int kBlockKv = Config::kBlockKv;
constexpr int kBlockQ = Config::kBlockQ;
constexpr int kHeadDim = Config::kHeadDim;
constexpr int kNumWarps = Config::kNumWarps;
constexpr int kValueDim = Config::kValueDim;

constexpr int kThreads = 32 * kNumWarps;

using QTile = tile::SwizzledTile<Element, kBlockQ, kHeadDim>;
using KTile = tile::SwizzledTile<Element, kBlockKv, kHeadDim>;
using VTile = tile::SwizzledTile<Element, kBlockKv, kValueDim>;
using OTile = tile::SwizzledTile<Element, kBlockQ, kValueDim>;  // tile of O and dO
using PTile = tile::SwizzledTile<Element, kBlockQ, kBlockKv>;  // tile of P and dS

using Listed = attention::StaticListed<Config::kIsListed, Config::kIsOrdered>;

// Return the rows first <= x < last of a matrix that starts at `data`.
template <class T>
CUFLASH_DEVICE tile::Matrix<T> rows(T* data, const attention::Matrices& matrices, int num_columns, int first,
                                    int last) {
  return {data + first * matrices.row_stride, matrices.row_stride, matrices.column_stride, last - first, num_columns};
}

// Return whether a matrix has the tile's number of columns, in chunks that a single instruction can copy. Call it once,
// before the first step.
template <class Tile, class T>
CUFLASH_DEVICE bool has_full_rows(T* data, const attention::Matrices& matrices, int num_columns) {
  return tile::has_full_rows<Tile>(rows(data, matrices, num_columns, 0, 0));
}

}  // namespace cuflash
