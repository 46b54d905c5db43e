// Host twin of kernels_cu/ptx/cp_async.cuh. The schedule chooses when a copy completes.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void cp_async_ca_4(uint32_t destination, const void* source, int source_bytes, CUFLASH_SIM_WHERE) {
  sim::cp_async(destination, source, 4, source_bytes, "cp_async_ca_4", where);
}
CUFLASH_DEVICE void cp_async_ca_8(uint32_t destination, const void* source, int source_bytes, CUFLASH_SIM_WHERE) {
  sim::cp_async(destination, source, 8, source_bytes, "cp_async_ca_8", where);
}
CUFLASH_DEVICE void cp_async_ca_16(uint32_t destination, const void* source, int source_bytes, CUFLASH_SIM_WHERE) {
  sim::cp_async(destination, source, 16, source_bytes, "cp_async_ca_16", where);
}
CUFLASH_DEVICE void cp_async_cg_16(uint32_t destination, const void* source, int source_bytes, CUFLASH_SIM_WHERE) {
  sim::cp_async(destination, source, 16, source_bytes, "cp_async_cg_16", where);
}

CUFLASH_DEVICE void cp_async_commit(CUFLASH_SIM_WHERE) { sim::cp_async_commit(where); }

template <int kPending>
CUFLASH_DEVICE void cp_async_wait(CUFLASH_SIM_WHERE) { sim::cp_async_wait(kPending, where); }

CUFLASH_DEVICE void cp_async_wait_all(CUFLASH_SIM_WHERE) { sim::cp_async_wait_all(where); }

}  // namespace cuflash::ptx
