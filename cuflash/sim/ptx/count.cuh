// Host twin of kernels_cu/ptx/count.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void red_add_release(int* count, int value, CUFLASH_SIM_WHERE) {
  sim::release_counter(count);
  atomicAdd(count, value, where);
}
// If blocks run one after another, only earlier blocks and lanes of this warp can have added to the count. A lane may
// add to it after other lanes have read it and before the warp votes, so the wait fails only at the second vote.
CUFLASH_DEVICE void wait_for_counter(const int* count, int mask, int threshold, CUFLASH_SIM_WHERE) {
  for (bool has_voted = false;; has_voted = true) {
    const int value = sim::are_blocks_together() ? __atomic_load_n(count, __ATOMIC_RELAXED)
                                                 : atomicAdd(const_cast<int*>(count), 0, where);
    if (__all_sync(0xffffffffu, (value & mask) >= threshold)) return sim::acquire_counter(count);
    if (!sim::are_blocks_together() && has_voted) sim::fail(where, "waits for a count of %d, which is %d", threshold, value & mask);
    if (sim::are_blocks_together() && threadIdx.x % 32 == 0 && (value & mask) < threshold)
      sim::wait_for_change(count, value, where);
  }
}

}  // namespace cuflash::ptx
