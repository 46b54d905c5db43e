// Asynchronous copies from global to shared memory. `source_bytes` are read, the rest of the destination becomes zero;
// with 0 the source is not touched. Both addresses are aligned to the size of the copy.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void cp_async_ca_4(uint32_t destination, const void* source, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

CUFLASH_DEVICE void cp_async_ca_8(uint32_t destination, const void* source, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

CUFLASH_DEVICE void cp_async_ca_16(uint32_t destination, const void* source, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

// Bypasses the L1 cache: for tiles that a block reads once.
CUFLASH_DEVICE void cp_async_cg_16(uint32_t destination, const void* source, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

// Closes the group of all copies that this thread issued since its last commit; an empty group counts too.
CUFLASH_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are in flight. Other threads also need a barrier.
template <int kPending>
CUFLASH_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all copies of this thread, committed or not.
CUFLASH_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cuflash::ptx
