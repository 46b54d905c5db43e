// A predicated store to global memory. Written as a branch it would be a basic block of its own; two hundred of them took a
// fifth of a kernel's time (experiments/results/sm90_steps.log, 16).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#predicated-execution
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void store_if(bool predicate, float* address, float value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(address), "f"(value),
               "r"(static_cast<int>(predicate))
               : "memory");
}

}  // namespace cuflash::ptx
