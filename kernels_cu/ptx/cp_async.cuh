// Asynchronous copies from global to shared memory. A copy reads `source_bytes` bytes and fills the rest of the
// destination with zeros; if `source_bytes` is 0, it does not access the source. Both addresses must be multiples of
// the copy's size.
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

// Copy 16 bytes past the L1 cache: for tiles that a block reads only once.
CUFLASH_DEVICE void cp_async_cg_16(uint32_t destination, const void* source, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

// Close the group of all copies that this thread has issued since its last commit; an empty group counts too.
CUFLASH_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of this thread's newest groups are still in flight. Data that other threads copied also
// need a barrier.
template <int kPending>
CUFLASH_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Wait for all copies that this thread has issued, committed or not.
CUFLASH_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cuflash::ptx
