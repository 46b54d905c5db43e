#pragma once
#include <attention/fragment_gradient.cuh>
#include <attention/mma_operands.cuh>
#include <tile/fragment_order.cuh>
#include <tile/opaque_copy.cuh>

// Where gradients go that two warpgroups made, 64 rows each, or all rows and half of the columns.
namespace cuflash {

// dQ of a tile of queries; where they are no multiple of 64, its columns are rows.
constexpr bool kDqIsTransposed = kBlockQ % 64 != 0;
using DqOfWarp = tile::WarpTile<1, kHeadDim * kBlockQ / 1024, kBlockQ / 16, 128 / kBlockQ>;
using DqSum = tile::FragmentOrder<DqOfWarp, 4, 8>;
// The same by rows, of those who round it.
template <bool IsTransposed>
struct RowsOfDq {
  using Tile = DqOfWarp;
  static CUFLASH_DEVICE void load(float* sums, Tile& dq) { DqSum(sums).load(dq); }
};
template <>
struct RowsOfDq<true> {
  using Tile = tile::WarpTile<1, kHeadDim / 16, kBlockQ / 16, 2>;
  static CUFLASH_DEVICE void load(float* sums, Tile& dq) { DqSum::load_transposed(sums, dq); }
};
using DqRows = RowsOfDq<kDqIsTransposed>;

// Rows of a gradient, from registers.
template <class Gradient>
CUFLASH_DEVICE void write_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Gradient& gradient) {
  if (to.is_wide) return attention::write_wide(to, work, head, num_columns, gradient);
  const auto all = attention::matrix<Element>(to, work.place, head, work.last, num_columns);
  tile::store(all.rows(work.first, work.last), gradient);
}

}  // namespace cuflash
