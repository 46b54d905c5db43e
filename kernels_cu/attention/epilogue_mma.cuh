#pragma once
#include <attention/config_mma.cuh>
#include <attention/score_gradient_mma.cuh>
#include <tile/accumulator_layout.cuh>

// Where gradients go.
namespace cuflash {

using DqPartition = tile::WarpPartition<kBlockQ, kHeadDim, kNumWarps>;
using WarpDq = DqPartition::Tile;
static_assert(DqPartition::kNumOwnerWarps == kNumWarps, "what two warps hold would be added twice");

// The sums of dQ of a tile of queries, as the warps of both kernels hold them.
using DqSumLayout = tile::AccumulatorLayout<WarpDq, config::kDqAtomicWidth == 4 ? 4 : 1>;

// Rows of a gradient leave by way of a room in shared memory, which is free; or in float32, where they are summed over
// broadcast axes afterwards, at once.
template <class Gradient, class Tile>
CUFLASH_DEVICE void stage_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Tile staging, Gradient& gradient) {
  if (to.is_accumulator) attention::write_accumulators(to, work, head, num_columns, gradient);
  else if (gradient.is_first_owner()) tile::store(staging, gradient);
}

// What is held. Called by all threads, once all of it is there.
template <class Tile>
CUFLASH_DEVICE void write_staged_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                          int num_columns,
                                          Tile staging) {
  if (to.is_accumulator) return;
  const auto all = attention::matrix<Element>(to, work.batch_head, head, work.last, num_columns);
  tile::store<kThreads>(all.rows(work.first, work.last), staging);
}

// Both. Called by all threads.
template <class Gradient, class Tile>
CUFLASH_DEVICE void write_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Tile staging, Gradient& gradient) {
  stage_gradient(to, work, head, num_columns, staging, gradient);
  __syncthreads();  // all of it is there
  write_staged_gradient(to, work, head, num_columns, staging);
}

}  // namespace cuflash
