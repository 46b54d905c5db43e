// Stores that are atomic, so that they do not race with atomic operations of other threads on the same word.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Store a word. Like `fetch_add`, the store orders no other accesses.
CUFLASH_DEVICE void store_relaxed(int* address, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace cuflash::ptx
