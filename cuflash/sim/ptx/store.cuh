// Host twin of kernels_cu/ptx/store.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void store_if(bool is_wanted, float* address, float value) {
  if (is_wanted) *address = value;
}

}  // namespace cuflash::ptx
