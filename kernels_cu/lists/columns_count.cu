// Counts the queries in each chunk of tiles that chose each key block, one thread block per chunk.
#include <attention/params.cuh>
#include <lists/columns.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_columns_count(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::lists;
  if (blockIdx.x >= chosen.num_list_heads * chosen.num_chunks) return;
  int32_t* const counts = ptx::dynamic_shared<int32_t>();
  const Chunk chunk(chosen, blockIdx.x);
  for (int base = 0; base < chosen.num_blocks; base += chosen.blocks_at_once) {
    const int num_blocks = min(chosen.blocks_at_once, chosen.num_blocks - base);
    count_queries(chosen, params.work.kv_blocks, chunk, base, base + num_blocks, counts);
    for (int block = threadIdx.x; block < num_blocks; block += 32 * Config::kNumWarps) {
      int count = 0;
#pragma unroll
      for (int warp = 0; warp < Config::kNumWarps; ++warp) count += counts[warp * chosen.blocks_at_once + block];
      chunk.counts(chosen)[base + block] = count;
    }
    __syncthreads();  // all threads have read all counts
  }
}
