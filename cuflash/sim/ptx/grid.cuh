// Host twin of kernels_cu/ptx/grid.cuh: grids follow each other.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void griddepcontrol_wait() {}
CUFLASH_DEVICE void griddepcontrol_launch_dependents() {}

}  // namespace cuflash::ptx
