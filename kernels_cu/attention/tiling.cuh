#pragma once
#include <attention/tile_scheduler.cuh>

// The tiles of a length, by index, for thread blocks that work on several of them.
namespace cuflash::attention {

// A range first <= x < last of queries, keys or columns.
struct Range {
  int first, last;

  CUFLASH_DEVICE bool is_empty() const { return first >= last; }
};

CUFLASH_DEVICE Range rows_of(const WorkTile& work) { return {work.first, work.last}; }

// The cut of a length into tiles that stay within blocks, as `work_tile` cuts it: the last tile of a block may be
// short, or empty.
struct Tiling {
  int length, block, height;

  CUFLASH_DEVICE int tiles_in_block() const { return (block + height - 1) / height; }
  CUFLASH_DEVICE int num_tiles() const { return (length + block - 1) / block * tiles_in_block(); }
  CUFLASH_DEVICE Range tile(int number) const {
    const int start = number / tiles_in_block() * block;
    const int first = start + number % tiles_in_block() * height;
    return {first, min(min(first + height, start + block), length)};
  }
};

// Return the tiles of the queries of one head or, in the second function, of its keys.
CUFLASH_DEVICE Tiling query_tiling(const Params& params, int height) {
  return {params.shape.seqlen_q, params.work.row_pointers != nullptr ? params.work.block_q : height, height};
}
CUFLASH_DEVICE Tiling key_tiling(const Params& params, int height) {
  return {params.shape.seqlen_kv, params.work.row_pointers != nullptr ? params.work.block_kv : height, height};
}

}  // namespace cuflash::attention
