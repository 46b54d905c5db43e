#pragma once
#include <attention/fragments.cuh>
#include <tile/async_copy.cuh>
#include <tile/tf32.cuh>

// A kernel's specification, and the tiles of its operands in shared memory, under the names that the paper gives them.
namespace cuflash {

using config::Element;
using config::kBlockKv;
using config::kBlockQ;
using config::kHeadDim;
using config::kNumWarps;
using config::kValueDim;

constexpr int kThreads = 32 * kNumWarps;

using QTile = tile::SwizzledTile<Element, kBlockQ, kHeadDim>;
using KTile = tile::SwizzledTile<Element, kBlockKv, kHeadDim>;
using VTile = tile::SwizzledTile<Element, kBlockKv, kValueDim>;
using OTile = tile::SwizzledTile<Element, kBlockQ, kValueDim>;  // and dO's
using PTile = tile::SwizzledTile<Element, kBlockQ, kBlockKv>;   // and dS's

using Listed = attention::ListedAs<config::kIsListed>;

// Rows first <= x < last of a matrix that starts at `data`.
template <class T>
CUFLASH_DEVICE tile::Matrix<T> rows(T* data, const attention::Matrices& matrices, int num_columns, int first, int last) {
  return {data + first * matrices.row_stride, matrices.row_stride, matrices.column_stride, last - first, num_columns};
}

// Whether its rows are those of a tile: asked once, so that no step has to look.
template <class Tile, class T>
CUFLASH_DEVICE bool has_rows_of(T* data, const attention::Matrices& matrices, int num_columns) {
  return tile::has_rows_of<Tile>(rows(data, matrices, num_columns, 0, 0));
}

}  // namespace cuflash
