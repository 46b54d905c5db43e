#pragma once
#include <ptx/tma.cuh>

namespace cuflash::tile {

// A stack of matrices as a tensor map describes it to the tensor memory accelerator.
struct TensorMapParam {
  ptx::TensorMap map;
  int64_t is_valid;  // else its strides are not what the accelerator can walk
};

}  // namespace cuflash::tile
