// Counting the blocks that have completed their work: the last block to arrive reads the results of all blocks.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Add to a counter in global memory and return its previous value, with acquire and release semantics: this thread then
// sees all writes that other threads made or observed before they called this function. A relaxed addition between two
// __threadfence calls would order more (fence.sc), and the block would wait for both fences.
CUFLASH_DEVICE int fetch_add_acq_rel(int* counter, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

}  // namespace cuflash::ptx
