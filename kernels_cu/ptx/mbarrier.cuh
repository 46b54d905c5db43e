// Barriers in shared memory, 8 bytes each, at which threads and asynchronous copies arrive. A phase ends when `count`
// threads have arrived and all announced bytes have been copied. Phases alternate between parity 0 and 1. The first
// phase has parity 0; the phase before it has parity 1 and counts as ended.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
// (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::assembly {

CUFLASH_DEVICE uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// End the kernel with an error, by a store to address 0. A trap would be an exit from the wait loop, for which ptxas
// would serialize wgmma (advisory C7512).
CUFLASH_DEVICE void fault() { asm volatile("st.global.u32 [%0], 0;" ::"l"(0ull) : "memory"); }

}  // namespace cuflash::assembly

namespace cuflash::ptx {

// Initialize a barrier. Called by one thread, before fence_mbarrier_init and a barrier of the block.
CUFLASH_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Make the barriers that this thread initialized visible to asynchronous copies and to other blocks of a cluster.
CUFLASH_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive with release semantics: threads that wait for the phase see this thread's earlier writes.
CUFLASH_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and announce the number of bytes that copies will write.
CUFLASH_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Return whether the phase with this parity has ended. The hardware may suspend the thread for a limited time first.
CUFLASH_DEVICE bool mbarrier_try_wait(uint32_t barrier, int phase) {
  int has_ended;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(has_ended)
               : "r"(barrier), "r"(phase)
               : "memory");
  return has_ended;
}

// Wait until the phase with this parity has ended. In a kernel with a watchdog, a wait longer than four seconds ends
// the kernel with a fault.
CUFLASH_DEVICE void mbarrier_wait(uint32_t barrier, int phase) {
  const uint64_t started_at = Config::kHasWatchdog ? assembly::nanoseconds() : 0;
  while (!mbarrier_try_wait(barrier, phase))
    if (Config::kHasWatchdog && assembly::nanoseconds() - started_at > 4'000'000'000u) assembly::fault();
}

}  // namespace cuflash::ptx
