// The block's dynamic shared memory, as a pointer and as the 32-bit address that instructions take.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvta
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Return the start of dynamic shared memory, aligned to 1024 bytes as the widest swizzle requires.
template <class T>
CUFLASH_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char cuflash_dynamic_shared[];
  return reinterpret_cast<T*>(cuflash_dynamic_shared);
}

CUFLASH_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace cuflash::ptx
