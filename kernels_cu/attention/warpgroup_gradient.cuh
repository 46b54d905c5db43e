#pragma once
#include <attention/fragment_gradient.cuh>
#include <attention/mma_operands.cuh>
#include <tile/fragment_order.cuh>
#include <tile/opaque_copy.cuh>

// Where gradients go that two warpgroups made, 64 rows each, or all rows and half of the columns.
namespace cuflash {

// dQ of a tile of queries.
using DqOfWarp = tile::WarpTile<1, kHeadDim * kBlockQ / 1024, kBlockQ / 16, 128 / kBlockQ>;
using DqSum = tile::FragmentOrder<DqOfWarp, 4, 8>;

// Rows of a gradient, from registers.
template <class Gradient>
CUFLASH_DEVICE void write_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Gradient& gradient) {
  if (to.is_wide) return attention::write_wide(to, work, head, num_columns, gradient);
  const auto all = attention::matrix<Element>(to, work.place, head, work.last, num_columns);
  tile::store(all.rows(work.first, work.last), gradient);
}

}  // namespace cuflash
