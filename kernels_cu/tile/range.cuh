#pragma once
#include <ptx/thread.cuh>

// Sums over a range that the lanes of a warp divide among themselves.
namespace cuflash::tile {

// Sum a function of int over first <= x < last. Called by whole warps.
template <class Value>
CUFLASH_DEVICE int warp_sum(int first, int last, Value value_of) {
  int sum = 0;
#pragma unroll 1
  for (int x = first + ptx::lane(); x < last; x += 32) sum += value_of(x);
  return __reduce_add_sync(0xffffffffu, sum);
}

}  // namespace cuflash::tile
