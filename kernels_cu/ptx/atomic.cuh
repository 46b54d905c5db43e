// Atomic additions to global memory; only the addition to an int returns the previous value.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// The sum is rounded to nearest after each addition, and additions occur in any order; subnormal sums of floats become 0.
CUFLASH_DEVICE void red_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
CUFLASH_DEVICE void red_add(double* address, double value) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(address), "d"(value) : "memory");
}

// Wraps around. The instruction is the same for signed integers.
CUFLASH_DEVICE void red_add(int64_t* address, int64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

CUFLASH_DEVICE int fetch_add(int* address, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// Adds to four consecutive floats, the first of which is aligned to 16 bytes; each sum is separate. From sm_90 on.
CUFLASH_DEVICE void red_add_4(float* address, const float (&values)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}

}  // namespace cuflash::ptx
