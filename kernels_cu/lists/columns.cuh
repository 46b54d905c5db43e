#pragma once
#include <attention/chosen_lists.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

// Three kernels list the queries that chose each key block, from the unions of tiles, as a stable counting sort:
// lists_columns_count counts the queries in each chunk of tiles, lists_columns_scan computes running sums of the
// counts, and lists_columns_fill writes the queries. The warps of a thread block divide the tiles of a chunk among
// themselves. No result depends on the order in which threads run.
namespace cuflash::lists {

using attention::ChosenLists;

constexpr int kTilesOfWarp = attention::kTilesOfChunk / Config::kNumWarps;
CUFLASH_DEVICE int warp_of_chunk() { return threadIdx.x / 32; }

// A chunk of a list head's tiles, and the part of them that a warp processes.
struct Chunk {
  int64_t list_head;
  int number, first_tile, last_tile;

  CUFLASH_DEVICE Chunk(const ChosenLists& chosen, int in_grid)
      : list_head(in_grid / chosen.num_chunks), number(in_grid % chosen.num_chunks) {
    first_tile = number * attention::kTilesOfChunk + warp_of_chunk() * kTilesOfWarp;
    last_tile = min(first_tile + kTilesOfWarp, chosen.num_tiles);
  }

  // Return the chunk's counts for all blocks.
  CUFLASH_DEVICE int32_t* counts(const ChosenLists& chosen) const {
    return chosen.chunk_counts + (list_head * chosen.num_chunks + number) * chosen.num_blocks;
  }
};

// Call visit(tile, block, word) for the entries of a warp's tiles whose blocks are first <= x < last, tile after tile;
// the lanes of a warp visit different blocks of one tile. Called by whole warps.
template <class Visit>
CUFLASH_DEVICE void for_each_entry(const ChosenLists& chosen, const int32_t* kv_blocks, const Chunk& chunk, int first,
                                   int last, Visit visit) {
  for (int tile = chunk.first_tile; tile < chunk.last_tile; ++tile) {
    const int32_t* const range = chosen.ranges + 2 * (chunk.list_head * chosen.num_tiles + tile);
    for (int entry = range[0] + ptx::lane(); entry < range[1]; entry += 32) {
      const int block = kv_blocks[entry];
      if (block >= first && block < last) visit(tile, block, chosen.word(entry));
    }
    __syncwarp();  // the next tile reads values that this one has changed
  }
}

// Count, for each warp's tiles, the queries that chose each of the blocks first <= x < last: counts[warp,
// blocks_at_once]. Called by all threads.
CUFLASH_DEVICE void count_queries(const ChosenLists& chosen, const int32_t* kv_blocks, const Chunk& chunk, int first,
                                  int last, int32_t* counts) {
  int32_t* const of_warp = counts + warp_of_chunk() * chosen.blocks_at_once;
  for (int block = ptx::lane(); block < last - first; block += 32) of_warp[block] = 0;
  __syncwarp();  // all counts are 0
  for_each_entry(chosen, kv_blocks, chunk, first, last,
                 [&](int, int block, uint64_t word) { of_warp[block - first] += __popcll(word); });
  __syncthreads();  // all warps have counted
}

}  // namespace cuflash::lists
