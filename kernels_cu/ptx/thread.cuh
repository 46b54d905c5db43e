// Indices of a thread. Each call reads the special register again, so that values derived from it need not stay in
// registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Return the thread's index in its warp, 0 to 31.
CUFLASH_DEVICE int lane() {
  int number;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(number));
  return number;
}

// Return the thread's index in its block.
CUFLASH_DEVICE int thread_index() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

// Return x, but hide its value from the compiler, which then does not hoist expressions of x out of loops.
CUFLASH_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keep loads from moving across this line, so that the loads of many rows do not occupy registers at the same time.
CUFLASH_DEVICE void compiler_barrier() { asm volatile("" ::: "memory"); }

}  // namespace cuflash::ptx
