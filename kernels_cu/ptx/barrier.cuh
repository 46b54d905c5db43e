// Named barriers of a thread block, with ids 0 to 15; __syncthreads uses barrier 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Wait until `threads` threads have arrived or waited at barrier `id`. Called by all 32 lanes of a warp.
CUFLASH_DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive at barrier `id` without waiting. Called by all 32 lanes of a warp.
CUFLASH_DEVICE void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cuflash::ptx
