#pragma once
#include <attention/tile_scheduler.cuh>

// The grid of blocks whose softmax weights are summed. Its blocks can differ from those of a list or a tile.
namespace cuflash::attention {

// A kernel argument: the parameters of a kernel that sums weights over blocks.
struct MassGrid {
  Matrices mass;  // [num_q_blocks, num_kv_blocks], accumulators
  int64_t block_q, block_kv;
  int64_t has_lse;  // whether lse is an input; otherwise the kernel computes lse from the keys and writes it
  // If not 0, rows of q consist of groups of this number of columns, and the groups of k are multiplied by those of q
  // in reverse order. Only kernels that process rows in chunks support it; each chunk is within one group.
  int64_t turned_columns;
  float* row_masses;  // [thread blocks, num_kv_blocks, queries of a tile]; null for kernels that do not use it

  CUFLASH_DEVICE int num_kv_blocks(const Shape& shape) const {
    const int block = static_cast<int>(block_kv);
    return (shape.seqlen_kv + block - 1) / block;
  }

  // Return the first column of q that is multiplied by column `column` of k.
  CUFLASH_DEVICE int column_of_q(const Shape& shape, int column) const {
    const int group = static_cast<int>(turned_columns);
    return group == 0 ? column : shape.head_dim - (column / group + 1) * group + column % group;
  }
};

// Return the number of queries of a thread block: the largest number of whole rows of the grid that fit into a tile of
// queries, but at least one row.
CUFLASH_DEVICE int mass_queries(const MassGrid& grid, int tile_rows) {
  const int block = static_cast<int>(grid.block_q);
  return block >= tile_rows ? block : tile_rows / block * block;
}

// A range of positions, cut at multiples of a block size.
struct BlockCuts {
  int first, last, block;

  CUFLASH_DEVICE int first_block() const { return first / block; }
  CUFLASH_DEVICE int count() const { return (last - 1) / block - first_block() + 1; }
  // Return the first position of the n-th block, relative to the start of the range. The second function returns its
  // end.
  CUFLASH_DEVICE int start(int n) const { return n == 0 ? 0 : (first_block() + n) * block - first; }
  CUFLASH_DEVICE int stop(int n) const { return n + 1 == count() ? last - first : start(n + 1); }
};

// Set the masses of the queries that a thread block owns to 0. Called by all threads of the block, before a barrier.
template <class T, int Threads>
CUFLASH_DEVICE void clear_masses(const MassGrid& grid, const Shape& shape, const WorkTile& owned) {
  const BlockCuts queries{owned.first, owned.last, static_cast<int>(grid.block_q)};
  const auto mass = matrix<T>(grid.mass, owned.batch_head, owned.batch_head.head, 0, 0);
  const int num_kv_blocks = grid.num_kv_blocks(shape), num_rows = owned.is_empty() ? 0 : queries.count();
  for (int n = 0; n < num_rows; ++n)
    for (int kv_block = threadIdx.x; kv_block < num_kv_blocks; kv_block += Threads)
      mass.at(queries.first_block() + n, kv_block) = 0;
}

}  // namespace cuflash::attention
