// Stores to global memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#predicated-execution
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Store a value with one instruction; the address must be a multiple of the type's alignment.
template <class T>
CUFLASH_DEVICE void store_aligned(T* address, const T& value) {
  *address = value;
}

// Store a value if a predicate holds. A branch would be a separate basic block; two hundred of them took a fifth of a
// kernel's time (step 16 of sm90_steps.log at commit b648872e).
CUFLASH_DEVICE void store_if(bool predicate, float* address, float value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(address), "f"(value),
               "r"(static_cast<int>(predicate))
               : "memory");
}

}  // namespace cuflash::ptx
