// Products of register tiles on the tensor cores: d (16 x 8) += a (16 x K) * b (K x 8), accumulated in float.
// With g = lane / 4 and t = lane % 4, 16-bit elements are stored as follows (two to a register, the lower half first):
//   a[0], a[1]: rows g, g + 8, columns 2t, 2t + 1;   a[2], a[3]: the same rows, columns 2t + 8, 2t + 9
//   b[0], b[1]: column g, rows 2t, 2t + 1 and 2t + 8, 2t + 9
//   d[0], d[1]: row g, columns 2t, 2t + 1;           d[2], d[3]: row g + 8
// For tf32, a register is one element: a has rows g, g + 8 of column t, then of column t + 4; b has rows t, t + 4; d is
// as above.
// For doubles (K = 4, accumulated in double, each multiply-add rounded once), a has rows g, g + 8 of column t, b has
// row t, and d is as above; the instruction with 8 rows takes only the first half of a and d.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// All 32 lanes of a warp call each of these functions together.
CUFLASH_DEVICE void mma_m16n8k16(Half, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

CUFLASH_DEVICE void mma_m16n8k16(BFloat16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Compute d = a * b, for the first of several products that are summed in d.
CUFLASH_DEVICE void first_mma_m16n8k16(Half, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

CUFLASH_DEVICE void first_mma_m16n8k16(BFloat16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// Operands are the bits of floats; the instruction ignores the lower 13 bits. to_tf32 in ptx/math.cuh rounds floats to
// the others.
CUFLASH_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Requires sm_80 or higher.
CUFLASH_DEVICE void mma_m8n8k4(double& d0, double& d1, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(d0), "+d"(d1)
               : "d"(a), "d"(b));
}

// Requires sm_90 or higher; chips after sm_90 emulate it with the m8n8k4 instruction.
CUFLASH_DEVICE void mma_m16n8k4(double& d0, double& d1, double& d2, double& d3, double a0, double a1, double b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(d0), "+d"(d1), "+d"(d2), "+d"(d3)
               : "d"(a0), "d"(a1), "d"(b));
}

}  // namespace cuflash::ptx
