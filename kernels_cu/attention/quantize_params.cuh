#pragma once
#include <ptx/types.cuh>

// The parameters of the kernels that round arrays to FP8. cuflash/planning/quantizing.py has the same records.
namespace cuflash::attention {

// An array that a launch quantizes: dense, [matrices, rows, kHeadDim]. Each thread block rounds one block of its rows.
struct QuantizedArray {
  const void* x;
  uint8_t* data;
  float* scale;  // [matrices, scales]
  const float* signs;  // [columns] signs applied before the Hadamard matrix; null if rows are not rotated
  uint8_t* transposed;  // [matrices, kHeadDim, padded_rows]; null if the array is not transposed
  int32_t num_rows, num_scales;
  int32_t num_blocks;  // blocks of a matrix: the scales' and, if the array is transposed, those after the last row
  int32_t end_block;  // thread blocks of this array and of those before it
};

constexpr int kMostArrays = 3;  // q, k and v

// The arrays of one launch.
struct Quantize {
  QuantizedArray arrays[kMostArrays];
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
