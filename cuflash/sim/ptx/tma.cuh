// Host twin of kernels_cu/ptx/tma.cuh. The schedule chooses when a copy completes.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

struct alignas(64) TensorMap { uint64_t words[16]; };

enum class Cache : uint64_t { kNormal, kEvictFirst, kEvictLast };

CUFLASH_DEVICE void prefetch_tensor_map(const TensorMap* map, CUFLASH_SIM_WHERE) { sim::check_tensor_map(map, where); }

CUFLASH_DEVICE void fence_proxy_async(CUFLASH_SIM_WHERE) { sim::fence_proxy_async(where); }
CUFLASH_DEVICE void fence_proxy_async_global() {}

CUFLASH_DEVICE void tma_load_4d(uint32_t destination, const TensorMap* map, uint32_t barrier, int x0, int x1, int x2,
                                int x3, Cache = Cache::kNormal, CUFLASH_SIM_WHERE) {
  sim::tma_load(destination, map, barrier, {4, {x0, x1, x2, x3}}, "tma_load_4d", where);
}
CUFLASH_DEVICE void tma_load_5d(uint32_t destination, const TensorMap* map, uint32_t barrier, int x0, int x1, int x2,
                                int x3, int x4, Cache = Cache::kNormal, CUFLASH_SIM_WHERE) {
  sim::tma_load(destination, map, barrier, {5, {x0, x1, x2, x3, x4}}, "tma_load_5d", where);
}
CUFLASH_DEVICE void tma_prefetch_5d(const TensorMap* map, int, int, int, int, int, CUFLASH_SIM_WHERE) {
  sim::check_tensor_map(map, where);
}
CUFLASH_DEVICE void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier,
                              CUFLASH_SIM_WHERE) {
  sim::bulk_load(destination, source, bytes, barrier, where);
}

CUFLASH_DEVICE void tma_store_4d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3,
                                 CUFLASH_SIM_WHERE) {
  sim::tma_store(map, source, {4, {x0, x1, x2, x3}}, false, "tma_store_4d", where);
}
CUFLASH_DEVICE void tma_store_5d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3, int x4,
                                 CUFLASH_SIM_WHERE) {
  if (threadIdx.x % 32 == 0) sim::tma_store(map, source, {5, {x0, x1, x2, x3, x4}}, false, "tma_store_5d", where);
}
CUFLASH_DEVICE void tma_add_4d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3,
                               CUFLASH_SIM_WHERE) {
  sim::tma_store(map, source, {4, {x0, x1, x2, x3}}, true, "tma_add_4d", where);
}
CUFLASH_DEVICE void tma_add_5d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3, int x4,
                               CUFLASH_SIM_WHERE) {
  sim::tma_store(map, source, {5, {x0, x1, x2, x3, x4}}, true, "tma_add_5d", where);
}
CUFLASH_DEVICE void bulk_store(void* destination, uint32_t source, int bytes, CUFLASH_SIM_WHERE) {
  if (threadIdx.x % 32 == 0) sim::bulk_store(destination, source, bytes, false, "bulk_store", where);
}
CUFLASH_DEVICE void bulk_add(float* destination, uint32_t source, int bytes, CUFLASH_SIM_WHERE) {
  if (threadIdx.x % 32 == 0) sim::bulk_store(destination, source, bytes, true, "bulk_add", where);
}
CUFLASH_DEVICE void bulk_commit(CUFLASH_SIM_WHERE) { sim::bulk_commit(where); }

template <int kPending>
CUFLASH_DEVICE void bulk_wait_read(CUFLASH_SIM_WHERE) { sim::bulk_wait(kPending, true, where); }

template <int kPending>
CUFLASH_DEVICE void bulk_wait(CUFLASH_SIM_WHERE) { sim::bulk_wait(kPending, false, where); }

}  // namespace cuflash::ptx
