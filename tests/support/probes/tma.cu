// One thread copies boxes of a tensor into shared memory, or out of it, one after another. `probe` defines kRank.
#include <ptx/mbarrier.cuh>
#include <ptx/shared.cuh>
#include <ptx/tma.cuh>
using namespace cuflash;

CUFLASH_DEVICE void load(uint32_t to, const ptx::TensorMap* map, uint32_t barrier, const int* x) {
  if constexpr (probe::kRank == 4) ptx::tma_load_4d(to, map, barrier, x[0], x[1], x[2], x[3], ptx::Cache::kEvictLast);
  else {
    ptx::tma_prefetch_5d(map, x[0], x[1], x[2], x[3], x[4]);
    ptx::tma_load_5d(to, map, barrier, x[0], x[1], x[2], x[3], x[4]);
  }
}

// Copies `count` boxes at the coordinates `places` into shared memory, and writes its contents after each copy.
extern "C" __global__ void __launch_bounds__(128)
loads(const __grid_constant__ ptx::TensorMap map, const void* tensor, const int* places, int count, int bytes, uint8_t* left) {
  uint8_t* shared = ptx::dynamic_shared<uint8_t>();
  const uint32_t tile = ptx::shared_address(shared), barrier = tile + bytes;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&map);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, bytes);
      load(tile, &map, barrier, places + i * probe::kRank);
    }
    ptx::mbarrier_wait(barrier, i % 2);
    for (int at = threadIdx.x; at < bytes; at += blockDim.x) left[i * bytes + at] = shared[at];
    __syncthreads();
  }
}

CUFLASH_DEVICE void store(const ptx::TensorMap* map, uint32_t from, const int* x, bool adds) {
  if constexpr (probe::kRank == 4) {
    if (adds) ptx::tma_add_4d(map, from, x[0], x[1], x[2], x[3]);
    else ptx::tma_store_4d(map, from, x[0], x[1], x[2], x[3]);
  } else {
    if (adds) ptx::tma_add_5d(map, from, x[0], x[1], x[2], x[3], x[4]);
    else ptx::tma_store_5d(map, from, x[0], x[1], x[2], x[3], x[4]);
  }
}

// Stores `count` boxes at the coordinates `places`, each with bytes from `tiles` in shared memory.
extern "C" __global__ void __launch_bounds__(128)
stores(const __grid_constant__ ptx::TensorMap map, void* tensor, const int* places, int count, int bytes, const uint8_t* tiles,
       int adds) {
  uint8_t* shared = ptx::dynamic_shared<uint8_t>();
  const uint32_t tile = ptx::shared_address(shared);
  for (int i = 0; i < count; ++i) {
    for (int at = threadIdx.x; at < bytes; at += blockDim.x) shared[at] = tiles[i * bytes + at];
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      store(&map, tile, places + i * probe::kRank, adds);
      ptx::bulk_commit();
      if (adds) ptx::bulk_wait_read<0>();
      else ptx::bulk_wait<0>();   // finish before another box is written to the same coordinates
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}
