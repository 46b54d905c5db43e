#pragma once
#include <tile/shared_tile.cuh>

// Constants of a simt kernel, from its specification, and the layouts of its operands in shared memory, with the names
// of FlashAttention-2 (arXiv 2307.08691).
namespace cuflash {

using Accumulator = Config::Accumulator;
using Element = Config::Element;
constexpr int kBlockKv = Config::kBlockKv;
constexpr int kBlockQ = Config::kBlockQ;
constexpr int kHeadDim = Config::kHeadDim;
constexpr int kValueDim = Config::kValueDim;

using QTile = tile::SharedTile<Accumulator, kBlockQ, kHeadDim>;
using KTile = tile::SharedTile<Accumulator, kBlockKv, kHeadDim>;
using VTile = tile::SharedTile<Accumulator, kBlockKv, kValueDim>;
using DoTile = tile::SharedTile<Accumulator, kBlockQ, kValueDim>;
using PTile = tile::SharedTile<Accumulator, kBlockQ, kBlockKv>;

// Total size of several tiles in shared memory, in bytes.
template <class... Tiles>
constexpr int kBytesOf = static_cast<int>(sizeof(Accumulator)) * (Tiles::kElements + ...);

// Number of adjacent columns that a thread sums.
constexpr int kRun = tile::Vector<Accumulator>::kLength;

}  // namespace cuflash
