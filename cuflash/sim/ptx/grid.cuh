// Host twin of kernels_cu/ptx/grid.cuh. Simulated grids run one after another, so there is nothing to wait for.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void griddepcontrol_wait() {}
CUFLASH_DEVICE void griddepcontrol_launch_dependents() {}

}  // namespace cuflash::ptx
