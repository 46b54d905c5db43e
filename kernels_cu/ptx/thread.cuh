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
CUFLASH_DEVICE int thread_index() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

// Whether the thread is the one of its warp that all of them elect, always the same one. Called by the whole warp. The compiler
// knows that it is one: copies that it starts need no loop over threads.
CUFLASH_DEVICE bool elect_one_lane() {
  int elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// The same number, of which the compiler knows nothing: what follows from it is not reckoned ahead of a loop and kept.
CUFLASH_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Loads stay on their side of this line, so that those of many rows do not wait in registers at once.
CUFLASH_DEVICE void compiler_barrier() { asm volatile("" ::: "memory"); }

}  // namespace cuflash::ptx
