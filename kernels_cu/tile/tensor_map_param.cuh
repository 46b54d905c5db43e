#pragma once
#include <ptx/tma.cuh>

namespace cuflash::tile {

// A stack of matrices as the tensor memory accelerator walks it.
struct TensorMapParam {
  ptx::TensorMap map;
  int64_t is_valid;  // else its strides are not what the accelerator can walk
};

}  // namespace cuflash::tile
