// Atomic additions to global memory; only the addition to an int returns the previous value.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Add a value to a sum, which is rounded to nearest after each addition. Additions happen in any order; subnormal sums
// of floats become 0.
CUFLASH_DEVICE void red_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
CUFLASH_DEVICE void red_add(double* address, double value) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(address), "d"(value) : "memory");
}

// Add an integer; the sum wraps around. The unsigned instruction is correct for signed integers too.
CUFLASH_DEVICE void red_add(int64_t* address, int64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

CUFLASH_DEVICE int fetch_add(int* address, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// Add to four consecutive floats, each atomically; `address` must be a multiple of 16 bytes. Requires sm_90 or higher.
CUFLASH_DEVICE void red_add_4(float* address, const float (&values)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}

}  // namespace cuflash::ptx
