// Host twin of kernels_cu/ptx/count.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void red_add_release(int* count, int value, CUFLASH_SIM_WHERE) { atomicAdd(count, value, where); }
// Blocks run one after another: what no earlier one left, none will.
CUFLASH_DEVICE void wait_for_counter(const int* count, int mask, int threshold, CUFLASH_SIM_WHERE) {
  const int value = atomicAdd(const_cast<int*>(count), 0, where);
  const bool is_there = __all_sync(0xffffffffu, (value & mask) >= threshold);
  if (!is_there) sim::fail(where, "waits for a count of %d, which is %d", threshold, value & mask);
}

}  // namespace cuflash::ptx
