// Host twin of kernels_cu/ptx/mbarrier.cuh. A wait that can never end is reported at once, with or without a watchdog.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void mbarrier_init(uint32_t barrier, int count, CUFLASH_SIM_WHERE) {
  sim::mbarrier_init(barrier, count, where);
}
CUFLASH_DEVICE void fence_mbarrier_init(CUFLASH_SIM_WHERE) { sim::fence_mbarrier_init(where); }
CUFLASH_DEVICE void mbarrier_arrive(uint32_t barrier, CUFLASH_SIM_WHERE) {
  sim::mbarrier_arrive(barrier, 0, "mbarrier_arrive", where);
}
CUFLASH_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes, CUFLASH_SIM_WHERE) {
  sim::mbarrier_arrive(barrier, bytes, "mbarrier_arrive_expect", where);
}
CUFLASH_DEVICE bool mbarrier_try_wait(uint32_t barrier, int parity, CUFLASH_SIM_WHERE) {
  return sim::mbarrier_wait(barrier, parity, false, "mbarrier_try_wait", where);
}
CUFLASH_DEVICE void mbarrier_wait(uint32_t barrier, int parity, CUFLASH_SIM_WHERE) {
  sim::mbarrier_wait(barrier, parity, true, "mbarrier_wait", where);
}

}  // namespace cuflash::ptx
