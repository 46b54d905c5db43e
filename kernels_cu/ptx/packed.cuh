// Arithmetic on what one register holds several of: two 16-bit floats, or four bytes.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Products of the lower and of the upper halves, rounded to nearest; subnormal numbers count. From sm_80 on.
CUFLASH_DEVICE uint32_t multiply2(Half, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Chips before sm_90 have no product of two bfloat16: it is the sum with -0.
CUFLASH_DEVICE uint32_t multiply2(BFloat16, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
  return z;
}

// Four bytes of x, which are numbers 0 to 3, and y, 4 to 7: four bits of the selector say which, those of the lowest first. With
// the fourth bit set, all bits of the byte are the highest one of the chosen byte.
CUFLASH_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
}

}  // namespace cuflash::ptx
