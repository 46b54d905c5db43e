// Host twin of kernels_cu/ptx/store.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE void store_aligned(T* address, const T& value, CUFLASH_SIM_WHERE) {
  sim::check_aligned(address, alignof(T), "store_aligned", where);
  *address = value;
}

CUFLASH_DEVICE void store_if(bool predicate, float* address, float value) {
  if (predicate) *address = value;
}

}  // namespace cuflash::ptx
