// Programmatic dependent launch: grids of one stream that overlap. In launches that do not allow it, both functions do nothing.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Waits until the grids before this one have ended and their writes are visible.
CUFLASH_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next grid may start once all blocks have called this or have ended; this does not make this grid's writes visible to it.
CUFLASH_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace cuflash::ptx
