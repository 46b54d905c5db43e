// Stores to global memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#predicated-execution
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Store by one instruction, for which the address must be a multiple of the type's alignment.
template <class T>
CUFLASH_DEVICE void store_aligned(T* address, const T& value) {
  *address = value;
}

// Store if a predicate holds. Written as a branch it would be a basic block of its own; two hundred of them took a fifth of
// a kernel's time (sm90_steps.log of b648872e, 16).
CUFLASH_DEVICE void store_if(bool predicate, float* address, float value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(address), "f"(value),
               "r"(static_cast<int>(predicate))
               : "memory");
}

}  // namespace cuflash::ptx
