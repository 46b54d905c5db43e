// Host twin of kernels_cu/ptx/arrival.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE int fetch_add_acq_rel(int* counter, int value, CUFLASH_SIM_WHERE) {
  sim::release_counter(counter);
  const int before = atomicAdd(counter, value, where);
  sim::acquire_counter(counter);
  return before;
}

}  // namespace cuflash::ptx
