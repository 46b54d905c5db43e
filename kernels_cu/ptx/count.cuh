// Counters in global memory with which thread blocks signal completed work to each other.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include <ptx/mbarrier.cuh>

namespace cuflash::ptx {

// Add to a counter with release semantics: blocks that read the new value with acquire semantics see all writes that
// this thread made or observed before.
CUFLASH_DEVICE void red_add_release(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// Wait until the masked bits of a counter reach a threshold, with acquire semantics: this thread then sees all writes
// that other threads made before their additions. Called by whole warps: if only one lane waited, ptxas would take
// extra registers throughout the kernel. In a kernel with a watchdog, a wait longer than four seconds ends the kernel
// with a fault.
CUFLASH_DEVICE void wait_for_counter(const int* counter, int mask, int threshold) {
  const uint64_t started_at = Config::kHasWatchdog ? assembly::nanoseconds() : 0;
  while (true) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    if (__all_sync(0xffffffffu, (value & mask) >= threshold)) return;
    if (Config::kHasWatchdog && assembly::nanoseconds() - started_at > 4'000'000'000u) assembly::fault();
  }
}

}  // namespace cuflash::ptx
