#pragma once
#include <attention/fragment_gradient.cuh>
#include <attention/mma_operands.cuh>
#include <tile/fragment_order.cuh>

// Where gradients go.
namespace cuflash {

using DqShare = tile::Share<kBlockQ, kHeadDim, kNumWarps>;
using DqOfWarp = DqShare::Tile;
static_assert(DqShare::kHolders == kNumWarps, "what two warps hold would be added twice");

// The sums of dQ of a tile of queries, as the warps of both kernels hold them.
using DqSum = tile::FragmentOrder<DqOfWarp, config::kDqAdds == 4 ? 4 : 1>;

// Rows of a gradient leave by way of a room in shared memory, which is free; or in float32, where they are summed over
// broadcast axes afterwards, at once.
template <class Gradient, class Tile>
CUFLASH_DEVICE void hold_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                  int num_columns, Tile room, Gradient& gradient) {
  if (to.is_wide) attention::write_wide(to, work, head, num_columns, gradient);
  else if (gradient.is_first_holder()) tile::store(room, gradient);
}

// What is held. Called by all threads, once all of it is there.
template <class Tile>
CUFLASH_DEVICE void write_held(const attention::Matrices& to, const attention::WorkTile& work, int head, int num_columns,
                               Tile room) {
  if (to.is_wide) return;
  const auto all = attention::matrix<Element>(to, work.place, head, work.last, num_columns);
  tile::store<kThreads>(all.rows(work.first, work.last), room);
}

// Both. Called by all threads.
template <class Gradient, class Tile>
CUFLASH_DEVICE void write_gradient(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                   int num_columns, Tile room, Gradient& gradient) {
  hold_gradient(to, work, head, num_columns, room, gradient);
  __syncthreads();  // all of it is there
  write_held(to, work, head, num_columns, room);
}

}  // namespace cuflash
