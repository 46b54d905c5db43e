// Grids of one stream that overlap, where the launch allows it: without that, both do nothing.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Waits until the grids before this one have ended and their writes are seen.
CUFLASH_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The grid after this one may start once all blocks have called this or ended; its writes are not promised by that.
CUFLASH_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace cuflash::ptx
