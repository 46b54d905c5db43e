// The count of blocks that have completed their work. The last of them reads the work of all.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Adds to a counter in global memory and returns its previous value, with release and acquire order: this thread then sees all
// writes that threads made or observed before their own additions by this function. __threadfence before and after a relaxed
// addition would order more, as a fence.sc, and a block would wait for both.
CUFLASH_DEVICE int fetch_add_acq_rel(int* counter, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

}  // namespace cuflash::ptx
