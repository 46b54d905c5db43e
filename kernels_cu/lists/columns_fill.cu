// Writes the queries that chose each key block, in ascending order, one thread block per chunk of tiles.
#include <attention/params.cuh>
#include <lists/columns.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_columns_fill(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::lists;
  if (blockIdx.x >= chosen.num_list_heads * chosen.num_chunks) return;
  int32_t* const places = ptx::dynamic_shared<int32_t>();  // for each warp: index of the next query of each block
  const Chunk chunk(chosen, blockIdx.x);
  const int32_t* const pointers = chosen.column_pointers + chunk.list_head * (chosen.num_blocks + 1);
  for (int base = 0; base < chosen.num_blocks; base += chosen.blocks_at_once) {
    const int num_blocks = min(chosen.blocks_at_once, chosen.num_blocks - base);
    count_queries(chosen, params.work.kv_blocks, chunk, base, base + num_blocks, places);
    for (int block = threadIdx.x; block < num_blocks; block += 32 * Config::kNumWarps) {
      int place = pointers[base + block] + chunk.counts(chosen)[base + block];
#pragma unroll
      for (int warp = 0; warp < Config::kNumWarps; ++warp) {
        int32_t& count = places[warp * chosen.blocks_at_once + block];
        const int first = place;
        place += count;
        count = first;
      }
    }
    __syncthreads();  // all indices are written
    int32_t* const of_warp = places + warp_of_chunk() * chosen.blocks_at_once;
    for_each_entry(chosen, params.work.kv_blocks, chunk, base, base + num_blocks,
                   [&](int tile, int block, uint64_t word) {
                     int place = of_warp[block - base];
                     const int first_query = tile * chosen.queries_per_tile;
                     for (; word != 0; word &= word - 1)
                       chosen.queries[place++] = first_query + __popcll(~word & (word - 1));
                     of_warp[block - base] = place;
                   });
    __syncthreads();  // all threads have read all indices
  }
}
