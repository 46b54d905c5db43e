// Host twin of kernels_cu/ptx/shared.cuh: the simulated block's memory. 0 is never a valid shared address.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE T* dynamic_shared() { return reinterpret_cast<T*>(sim::dynamic_shared()); }

CUFLASH_DEVICE uint32_t shared_address(const void* pointer, CUFLASH_SIM_WHERE) {
  return sim::shared_address(pointer, where);
}

}  // namespace cuflash::ptx
