// Joins the lists of neighboring queries, one warp per tile of queries: writes every block that at least one query
// chose, in ascending order, with a bit for each query, set if the query chose the block. A list is a set: a block that
// it has twice counts once.
#include <lists/chosen.cuh>
#include <ptx/shared.cuh>

extern "C" __global__ void __launch_bounds__(32) lists_unions(const __grid_constant__ cuflash::lists::ChosenParams params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  uint32_t* const words = ptx::dynamic_shared<uint32_t>();  // [blocks_at_once, words_per_entry]
  const int tile = blockIdx.x, lane = ptx::lane(), num_words = params.words_per_entry;
  const int batch_head = tile / params.num_tiles, first_query = tile % params.num_tiles * params.queries_per_tile;
  const int batch_entry = batch_head / params.num_heads, head = batch_head % params.num_heads;
  const int num_queries = min(params.queries_per_tile, params.seqlen_q - first_query);
  const int longest = longest_list(params, batch_entry, head, first_query, num_queries);
  int entry = tile * params.max_entries;  // int32 suffices to number all entries
  if (lane == 0) params.ranges[2 * tile] = entry;
  for (int base = 0; base < params.num_blocks; base += params.blocks_at_once) {
    const int num_blocks = min(params.blocks_at_once, params.num_blocks - base);
    for (int x = lane; x < num_blocks * num_words; x += 32) words[x] = 0;
    __syncwarp();  // all words are 0
    for (int x = lane; x < num_queries * longest; x += 32) {
      const int row = x / longest;
      const int block = ChosenList(params, batch_entry, head, first_query + row).at(x % longest) - base;
      if (block >= 0 && block < num_blocks) atomicOr(&words[block * num_words + row / 32], 1u << row % 32);
    }
    __syncwarp();  // all bits are set
    for (int start = 0; start < num_blocks; start += 32) {
      const int block = start + lane;
      const bool is_within = block < num_blocks;
      const uint32_t low = is_within ? words[block * num_words] : 0;
      const uint32_t high = is_within && num_words == 2 ? words[block * num_words + 1] : 0;
      const uint32_t chosen = __ballot_sync(0xffffffffu, (low | high) != 0);
      if ((low | high) != 0) {
        const int64_t place = entry + __popc(chosen & ((1u << lane) - 1));
        params.kv_blocks[place] = base + block;
        params.words[place * num_words] = low;
        if (num_words == 2) params.words[place * num_words + 1] = high;
      }
      entry += __popc(chosen);
    }
    __syncwarp();  // all lanes have read the words
  }
  if (lane == 0) params.ranges[2 * tile + 1] = entry;
}
