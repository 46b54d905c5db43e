#pragma once
#include <ptx/tma.cuh>

// Tensor maps as parts of kernel arguments.
namespace cuflash::tile {

// The tensor map of a stack of matrices, which TMA reads.
struct TensorMapParam {
  ptx::TensorMap map;
  int64_t is_valid;  // 0 if TMA does not support the strides of the stack
};

}  // namespace cuflash::tile
