// What four warps of a warpgroup agree on, and what one lane does for its warp.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg (sm_90a)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Registers that each thread of this warpgroup keeps: a multiple of 8 from 24 to 256, fewer than it has. Called by all
// of its threads.
template <int kRegisters>
CUFLASH_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// More than it has; waits until other warpgroups of the block have given up enough.
template <int kRegisters>
CUFLASH_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in one lane of the warp, the same at every call. Called by all 32 lanes.
CUFLASH_DEVICE bool elect_one() {
  int is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is_elected));
  return is_elected;
}

}  // namespace cuflash::ptx
