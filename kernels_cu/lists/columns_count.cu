// Counts the queries in each chunk of tiles that chose each key block, one warp per chunk.
#include <attention/params.cuh>
#include <lists/columns.cuh>

extern "C" __global__ void __launch_bounds__(32)
lists_columns_count(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::lists;
  if (blockIdx.x >= chosen.num_list_heads * chosen.num_chunks) return;
  int32_t* const counts = ptx::dynamic_shared<int32_t>();
  const Chunk chunk(chosen, blockIdx.x);
  for (int base = 0; base < chosen.num_blocks; base += chosen.blocks_at_once) {
    const int num_blocks = min(chosen.blocks_at_once, chosen.num_blocks - base);
    for (int block = ptx::lane(); block < num_blocks; block += 32) counts[block] = 0;
    __syncwarp();  // all counts are 0
    for_each_entry(chosen, params.work.kv_blocks, chunk, base, base + num_blocks,
                   [&](int, int block, uint64_t word) { counts[block - base] += __popcll(word); });
    for (int block = ptx::lane(); block < num_blocks; block += 32) chunk.counts(chosen)[base + block] = counts[block];
    __syncwarp();  // all counts are read
  }
}
