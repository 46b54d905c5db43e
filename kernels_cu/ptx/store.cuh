// Stores to global memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#predicated-execution
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Stores by one instruction, for which the address must be a multiple of the type's alignment.
template <class T>
CUFLASH_DEVICE void store_aligned(T* address, const T& value) {
  *address = value;
}

// Stores if a predicate holds. A branch would be a separate basic block; two hundred of them took a fifth of a kernel's time
// (sm90_steps.log of b648872e, 16).
CUFLASH_DEVICE void store_if(bool predicate, float* address, float value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(address), "f"(value),
               "r"(static_cast<int>(predicate))
               : "memory");
}

}  // namespace cuflash::ptx
