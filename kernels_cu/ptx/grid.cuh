// Programmatic dependent launch: a grid may start before the previous grid of its stream has ended. In launches that do
// not allow this, both functions do nothing.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
// (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// Wait until the preceding grids have ended and their writes are visible.
CUFLASH_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the next grid to start once all blocks of this grid have called this function or ended. This does not make the
// writes of this grid visible to the next one.
CUFLASH_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace cuflash::ptx
