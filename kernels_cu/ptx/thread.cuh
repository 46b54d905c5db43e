// Indices of a thread. Each call reads them again, so that values derived from them need not stay in registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// The thread's number in its warp, 0 to 31.
CUFLASH_DEVICE int lane() {
  int number;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(number));
  return number;
}

// The thread's number in its block.
CUFLASH_DEVICE int thread_index() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

// Returns x in a way that hides its value from the compiler, which then does not hoist expressions of it out of loops.
CUFLASH_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keeps loads from moving across this line, so that the loads of many rows do not occupy registers at once.
CUFLASH_DEVICE void compiler_barrier() { asm volatile("" ::: "memory"); }

}  // namespace cuflash::ptx
