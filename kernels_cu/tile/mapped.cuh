#pragma once
#include <ptx/tma.cuh>

namespace cuflash::tile {

// A stack of matrices as the tensor memory accelerator walks it.
struct Mapped {
  ptx::TensorMap map;
  int64_t is_there;  // else its strides are not what the accelerator can walk
};

}  // namespace cuflash::tile
