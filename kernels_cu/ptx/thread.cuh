// Where a thread stands: asked for again at every call, so that what follows from it need not stay in registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// The thread's number in its warp.
CUFLASH_DEVICE int lane() {
  int number;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(number));
  return number;
}

// The same in its block.
CUFLASH_DEVICE int thread() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

// Loads stay on their side of this line, so that those of many rows do not wait in registers at once.
CUFLASH_DEVICE void keep_loads_apart() { asm volatile("" ::: "memory"); }

}  // namespace cuflash::ptx
