#pragma once
#include <ptx/atomic.cuh>
#include <ptx/thread.cuh>

// Sums in global memory that many thread blocks add to.
namespace cuflash::tile {

// Add what all threads of a warp have for one address. Called by whole warps.
template <class T>
CUFLASH_DEVICE void add_of_warp(T* address, T x) {
#pragma unroll
  for (int lane_offset = 16; lane_offset > 0; lane_offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  if (ptx::lane() == 0) ptx::red_add(address, x);
}

}  // namespace cuflash::tile
