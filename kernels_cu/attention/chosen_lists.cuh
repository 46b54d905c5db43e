#pragma once
#include <attention/feature_argument.cuh>
#include <ptx/types.cuh>

namespace cuflash::attention {

// A kernel argument: for each tile, the union of the lists of its queries, and for each block, the queries that chose
// it. cuflash/planning/chosen_lists.py has the record as a NumPy dtype. A list head is a batch entry with a group of
// heads that share lists. `kv_blocks` of the work list has the block of each entry.
struct ChosenLists {
  const int32_t* ranges;  // [list head, tile, 2] entries of each tile: first <= x < last
  const uint32_t* words;  // [entry, words_per_entry] bit r is set if query r of the tile chose the block
  // [list head, chunk, block] number of queries in a chunk of tiles that chose a block; later, the number of those in
  // the chunks before it
  int32_t* chunk_counts;
  int32_t* column_pointers;  // [list head, num_blocks + 1] start of each block's queries
  int32_t* queries;  // [list head, max_members] queries that chose each block, ascending, block after block
  // [list head, num_blocks + 1] index of the first part of each block's sums; only blocks that more queries chose than
  // a part has are divided into parts
  int32_t* part_pointers;
  float* column_parts;  // [batch entry and key/value head, max_parts, tiles of a block] sums of dK and dV, by thread
  int32_t* part_arrivals;  // [batch entry and key/value head, tile of keys] number of parts written; 0 before and after
  int32_t batch_stride, head_stride;  // in list heads; 0 if lists are shared along an axis
  int32_t num_list_heads, heads_per_list;  // list heads of all batch entries; heads of q that share a list
  int32_t heads_per_tile, queries_per_tile, num_tiles;  // num_tiles: tiles per list head
  int32_t num_blocks, words_per_entry, max_members;
  int32_t num_chunks, blocks_at_once;  // chunks of tiles per list head; blocks for which shared memory has counts
  int32_t queries_per_part, num_parts, max_parts;  // at most num_parts thread blocks share a tile of keys
  int32_t padding;

  // Return an entry's bit mask: the bit of each query in the tile is set if the query chose the entry's block.
  CUFLASH_DEVICE uint64_t word(int entry) const {
    const uint32_t* const low = words + static_cast<int64_t>(entry) * words_per_entry;
    return words_per_entry == 2 ? static_cast<uint64_t>(low[1]) << 32 | low[0] : low[0];
  }
};
constexpr int kTilesOfChunk = 64;

struct NoChosenLists {};
template <class Config>
using ChosenArgument = FeatureArgument<Config::kPacksQueries, ChosenLists, NoChosenLists>;
constexpr NoChosenLists chosen{};

}  // namespace cuflash::attention
