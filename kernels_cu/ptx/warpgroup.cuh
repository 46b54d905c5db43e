// Register counts of warpgroups, and the election of one lane in a warp.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg (sm_90a)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Reduce the registers of each thread of this warpgroup to kRegisters, a multiple of 8 from 24 to 256. Called by all
// threads of the warpgroup.
template <int kRegisters>
CUFLASH_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Raise the registers of each thread to kRegisters; wait until other warpgroups of the block have released enough.
template <int kRegisters>
CUFLASH_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Return true in one lane of the warp, the same lane in every call. Called by whole warps. The compiler knows that a
// single lane takes the branch, so copies that this lane starts need no loop over threads.
CUFLASH_DEVICE bool elect_one() {
  int is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is_elected));
  return is_elected;
}

}  // namespace cuflash::ptx
