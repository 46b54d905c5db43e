// Counts in global memory, by which blocks tell each other what is done.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include <ptx/mbarrier.cuh>

namespace cuflash::ptx {

// Adds to a count, by which other blocks learn of all that this thread wrote, or knows to be written, before.
CUFLASH_DEVICE void red_add_release(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// Waits until these bits of such a count are no less than a number: what others wrote before they added to it, this thread
// sees after. Called by whole warps: where one lane waits, ptxas takes registers from the whole kernel. A kernel that is
// watched faults after four seconds.
CUFLASH_DEVICE void wait_for_counter(const int* counter, int mask, int threshold) {
  const uint64_t started_at = config::kHasWatchdog ? assembly::nanoseconds() : 0;
  while (true) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    if (__all_sync(0xffffffffu, (value & mask) >= threshold)) return;
    if (config::kHasWatchdog && assembly::nanoseconds() - started_at > 4'000'000'000u) assembly::fault();
  }
}

}  // namespace cuflash::ptx
