#pragma once
#include <attention/chosen_lists.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

// Three kernels list the queries that chose each key block from the unions of tiles, as a stable counting sort:
// lists_columns_count counts them for each chunk of tiles, lists_columns_scan computes running sums of the counts, and
// lists_columns_fill writes the queries. No result depends on the order in which threads run.
namespace cuflash::lists {

using attention::ChosenLists;

// A chunk of tiles of a list head.
struct Chunk {
  int64_t list_head;
  int number, first_tile, last_tile;

  CUFLASH_DEVICE Chunk(const ChosenLists& chosen, int in_grid)
      : list_head(in_grid / chosen.num_chunks), number(in_grid % chosen.num_chunks) {
    first_tile = number * attention::kTilesOfChunk;
    last_tile = min(first_tile + attention::kTilesOfChunk, chosen.num_tiles);
  }

  // Return the chunk's counts of all blocks.
  CUFLASH_DEVICE int32_t* counts(const ChosenLists& chosen) const {
    return chosen.chunk_counts + (list_head * chosen.num_chunks + number) * chosen.num_blocks;
  }
};

// Call visit(tile, block, word) for the entries of a chunk whose blocks are first <= x < last: tile after tile, with
// the lanes of a warp on different blocks of one tile. Called by whole warps.
template <class Visit>
CUFLASH_DEVICE void for_each_entry(const ChosenLists& chosen, const int32_t* kv_blocks, const Chunk& chunk, int first,
                                   int last, Visit visit) {
  for (int tile = chunk.first_tile; tile < chunk.last_tile; ++tile) {
    const int32_t* const range = chosen.ranges + 2 * (chunk.list_head * chosen.num_tiles + tile);
    for (int entry = range[0] + ptx::lane(); entry < range[1]; entry += 32) {
      const int block = kv_blocks[entry];
      if (block >= first && block < last) visit(tile, block, chosen.word(entry));
    }
    __syncwarp();  // the next tile reads what this one has changed
  }
}

}  // namespace cuflash::lists
