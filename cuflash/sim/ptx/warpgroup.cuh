// Host twin of kernels_cu/ptx/warpgroup.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

template <int kRegisters>
CUFLASH_DEVICE void setmaxnreg_dec(CUFLASH_SIM_WHERE) { sim::setmaxnreg(kRegisters, false, where); }
template <int kRegisters>
CUFLASH_DEVICE void setmaxnreg_inc(CUFLASH_SIM_WHERE) { sim::setmaxnreg(kRegisters, true, where); }

CUFLASH_DEVICE bool elect_one(CUFLASH_SIM_WHERE) { return sim::elect_one(where); }

}  // namespace cuflash::ptx
