// Arithmetic on two 16-bit floats in one register.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Return the products of the lower halves and of the upper halves, rounded to nearest; subnormal numbers are not
// flushed. Requires sm_80 or higher.
CUFLASH_DEVICE uint32_t multiply2(Half, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Chips before sm_90 have no bfloat16 multiplication, so the product is a multiply-add with -0.
CUFLASH_DEVICE uint32_t multiply2(BFloat16, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
  return z;
}

}  // namespace cuflash::ptx
