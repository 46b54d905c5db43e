#pragma once
#include <attention/tile_scheduler.cuh>

// The grid of blocks whose softmax weights are summed. Its blocks need not be those of a list or of a tile.
namespace cuflash::attention {

// A kernel argument: the parameters of a kernel that sums weights over blocks.
struct MassGrid {
  Matrices mass;  // [num_q_blocks, num_kv_blocks], accumulators, zero before the kernel
  int64_t block_q, block_kv;
  int64_t has_lse;  // lse is an input; otherwise the kernel computes it from the keys that it walks, and writes it
  float* row_masses;  // [thread blocks, num_kv_blocks, queries of a tile]; null for kernels that do not use it

  CUFLASH_DEVICE int num_kv_blocks(const Shape& shape) const {
    const int block = static_cast<int>(block_kv);
    return (shape.seqlen_kv + block - 1) / block;
  }
};

// Return the number of queries of a thread block: as many whole rows of the grid as a tile of queries holds, and at
// least one.
CUFLASH_DEVICE int mass_queries(const MassGrid& grid, int tile_rows) {
  const int block = static_cast<int>(grid.block_q);
  return block >= tile_rows ? block : tile_rows / block * block;
}

// A run of positions cut at multiples of a block.
struct BlockCuts {
  int first, last, block;

  CUFLASH_DEVICE int first_block() const { return first / block; }
  CUFLASH_DEVICE int count() const { return (last - 1) / block - first_block() + 1; }
  // Return the positions of the n-th block, relative to the first position.
  CUFLASH_DEVICE int start(int n) const { return n == 0 ? 0 : (first_block() + n) * block - first; }
  CUFLASH_DEVICE int stop(int n) const { return n + 1 == count() ? last - first : start(n + 1); }
};

}  // namespace cuflash::attention
