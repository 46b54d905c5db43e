#pragma once
#include <tile/mapped.cuh>

// What a launch hands to kernels that let the tensor memory accelerator copy tiles, beside Params. cuflash/records.py has
// the same record as a NumPy dtype.
namespace cuflash::attention {

using tile::Mapped;

// Stacks [batch, batch, heads, rows, columns], an axis of extent 1 where its stride is 0; columns come first.
struct TensorMaps {
  Mapped q, k, v, do_;
};

}  // namespace cuflash::attention
