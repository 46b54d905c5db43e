// Moves of 8x8 matrices of 16-bit elements between shared memory and registers, one to four matrices at a time.
// Lane i passes the address of row i % 8 of matrix i / 8, a multiple of 16 bytes; addresses of lanes past the last row
// are ignored.
// In registers, lane i holds elements (i / 4, 2 * (i % 4)) and (i / 4, 2 * (i % 4) + 1) of each matrix, the first in
// the lower half;
// with _trans, the matrix in registers is the transpose of the one in shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix and -stmatrix (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// All 32 lanes of a warp call each of these functions together.
CUFLASH_DEVICE void ldmatrix_x1(uint32_t (&matrices)[1], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(matrices[0])
               : "r"(address)
               : "memory");
}

CUFLASH_DEVICE void ldmatrix_x2(uint32_t (&matrices)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrices[0]), "=r"(matrices[1])
               : "r"(address)
               : "memory");
}

CUFLASH_DEVICE void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

CUFLASH_DEVICE void ldmatrix_x1_trans(uint32_t (&matrices)[1], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(matrices[0])
               : "r"(address)
               : "memory");
}

CUFLASH_DEVICE void ldmatrix_x2_trans(uint32_t (&matrices)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrices[0]), "=r"(matrices[1])
               : "r"(address)
               : "memory");
}

CUFLASH_DEVICE void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

CUFLASH_DEVICE void stmatrix_x1(uint32_t address, const uint32_t (&matrices)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
               :
               : "r"(address), "r"(matrices[0])
               : "memory");
}

CUFLASH_DEVICE void stmatrix_x2(uint32_t address, const uint32_t (&matrices)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               :
               : "r"(address), "r"(matrices[0]), "r"(matrices[1])
               : "memory");
}

CUFLASH_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

CUFLASH_DEVICE void stmatrix_x1_trans(uint32_t address, const uint32_t (&matrices)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
               :
               : "r"(address), "r"(matrices[0])
               : "memory");
}

CUFLASH_DEVICE void stmatrix_x2_trans(uint32_t address, const uint32_t (&matrices)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :
               : "r"(address), "r"(matrices[0]), "r"(matrices[1])
               : "memory");
}

CUFLASH_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace cuflash::ptx
