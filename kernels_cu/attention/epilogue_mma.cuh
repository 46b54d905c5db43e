#pragma once
#include <attention/config_mma.cuh>
#include <attention/score_gradient_mma.cuh>
#include <tile/accumulator_layout.cuh>

// The epilogue of gradients, from accumulators to global memory.
namespace cuflash {

using DqPartition = tile::WarpPartition<kBlockQ, kHeadDim, kNumWarps>;
using WarpDq = DqPartition::Tile;
static_assert(DqPartition::kNumOwnerWarps == kNumWarps, "a part that two warps hold would be added twice");

// Layout of a query tile's sums of dQ, shared by the kernels that add to them and the kernel that rounds them.
using DqSumLayout = tile::AccumulatorLayout<WarpDq, Config::kDqAtomicWidth == 4 ? 4 : 1>;

// Layout of the sums of dQ in kernels whose steps have rows of any queries: the sums of a head are a matrix of queries.
using DqSumRows = tile::RowLayout<WarpDq, Config::kDqAtomicWidth == 4 ? 4 : 1>;
CUFLASH_DEVICE attention::Matrices dq_sum_rows(const attention::Params& params) {
  attention::Matrices rows = params.dq_sum;
  rows.row_stride = kHeadDim;
  return rows;
}

// Stage the rows of a gradient in free shared memory before they are stored. float32 gradients, which are summed over
// broadcast axes afterwards, are stored directly.
template <class Gradient, class Tile>
CUFLASH_DEVICE void stage_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Tile staging, Gradient& gradient) {
  if (to.is_accumulator) attention::write_accumulators(to, work, head, num_columns, gradient);
  else if (gradient.is_first_owner()) tile::store(staging, gradient);
}

// Store the staged rows. Called by all threads, after a barrier.
template <class Tile>
CUFLASH_DEVICE void write_staged_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                          int num_columns, Tile staging) {
  if (to.is_accumulator) return;
  const auto all = attention::matrix<Element>(to, work.batch_head, head, work.last, num_columns);
  tile::store<kThreads>(all.rows(work.first, work.last), staging);
}

// Stage and store the rows. Called by all threads.
template <class Gradient, class Tile>
CUFLASH_DEVICE void write_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Tile staging, Gradient& gradient) {
  stage_gradient(to, work, head, num_columns, staging, gradient);
  __syncthreads();  // all rows are staged
  write_staged_gradient(to, work, head, num_columns, staging);
}

}  // namespace cuflash
