// Host twin of kernels_cu/ptx/store.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void store_if(bool predicate, float* address, float value) {
  if (predicate) *address = value;
}

}  // namespace cuflash::ptx
