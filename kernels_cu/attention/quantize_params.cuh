#pragma once
#include <ptx/types.cuh>

// The parameters of the kernels that round arrays to FP8. cuflash/planning/quantizing.py has the same records.
namespace cuflash::attention {

// Dense arrays [matrices, rows, kHeadDim]; a thread block rounds a block of rows.
struct Quantize {
  const void* x;
  uint8_t* data;
  float* scale;  // [matrices, blocks]
  const float* signs;  // [columns] signs applied before the Hadamard matrix; null if rows are not rotated
  int32_t num_rows, num_blocks;
  float largest;  // largest magnitude of a block after division by its scale
  float normalizer;  // factor of the Hadamard matrix
};

// The parameters of the kernel that writes the transpose: bytes [matrices, rows, columns] of `data` become [matrices,
// columns, padded_rows].
struct Transpose {
  const uint8_t* data;
  uint8_t* transposed;
  int32_t num_rows, padded_rows;
};

}  // namespace cuflash::attention
