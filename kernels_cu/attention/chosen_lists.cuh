#pragma once
#include <attention/feature_argument.cuh>
#include <ptx/types.cuh>

namespace cuflash::attention {

// A kernel argument: the unions of the lists of each tile, and for each block the queries that chose it.
// cuflash/planning/chosen_lists.py has the record as a NumPy dtype. A list head is a batch entry with the heads that
// share lists. Blocks of entries are `kv_blocks` of the work list.
struct ChosenLists {
  const int32_t* ranges;  // [list head, tile, 2] the entries of a tile: first <= x < last
  const uint32_t* words;  // [entry, words_per_entry] bit r: query r of the tile chose the block
  // [list head, chunk, block] number of queries in a chunk of tiles that chose a block, later the number before the
  // chunk
  int32_t* chunk_counts;
  int32_t* column_pointers;  // [list head, num_blocks + 1] where the queries of each block start
  int32_t* queries;  // [list head, max_members] those that chose a block, ascending, block after block
  // [list head, num_blocks + 1] first part of each block's sums; only blocks with more queries than a part have parts
  int32_t* part_pointers;
  float* column_parts;  // [batch entry and key/value head, max_parts, tiles of a block] sums of dK and dV, by thread
  int32_t* part_arrivals;  // [batch entry and key/value head, tile of keys] parts that are written; zeros before and after
  int32_t batch_stride, head_stride;  // in list heads; 0 if an axis shares lists
  int32_t num_list_heads, heads_per_list;  // number in all batch entries; heads of q that share a list
  int32_t heads_per_tile, queries_per_tile, num_tiles;  // tiles of a list head
  int32_t num_blocks, words_per_entry, max_members;
  int32_t num_chunks, blocks_at_once;  // chunks of tiles of a list head; blocks for which shared memory has counts
  int32_t queries_per_part, num_parts, max_parts;  // num_parts thread blocks share a tile of keys, at most
  int32_t padding;

  // Return the word of an entry, which has a bit for each query of the tile that chose the entry's block.
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
