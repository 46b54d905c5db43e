// Host twin of kernels_cu/ptx/barrier.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void bar_sync(int id, int threads, CUFLASH_SIM_WHERE) { sim::barrier(id, threads, true, where); }
CUFLASH_DEVICE void bar_arrive(int id, int threads, CUFLASH_SIM_WHERE) { sim::barrier(id, threads, false, where); }

}  // namespace cuflash::ptx
