#pragma once
#include <attention/tile_scheduler.cuh>
#include <tile/gemm_simt.cuh>

// Sums of softmax weights over the blocks of a grid, which need not be those of a list or of a tile.
namespace cuflash::attention {

// The parameters of a kernel that sums weights over blocks, an argument of its own.
struct MassGrid {
  Matrices mass;  // [num_q_blocks, num_kv_blocks], accumulators, zero before the kernel
  int64_t block_q, block_kv;
  int64_t has_lse;  // lse is given; otherwise the kernel computes it from the keys that it walks, and writes it
};

// As many whole rows of the grid as a tile of queries holds, and one at least: the queries of a thread block.
CUFLASH_DEVICE int mass_queries(const MassGrid& grid, int tile_rows) {
  const int block = static_cast<int>(grid.block_q);
  return block >= tile_rows ? block : tile_rows / block * block;
}

// A run of positions cut at multiples of a block.
struct BlockCuts {
  int first, last, block;

  CUFLASH_DEVICE int first_block() const { return first / block; }
  CUFLASH_DEVICE int count() const { return (last - 1) / block - first_block() + 1; }
  // The positions of the n-th block, relative to the first position.
  CUFLASH_DEVICE int start(int n) const { return n == 0 ? 0 : (first_block() + n) * block - first; }
  CUFLASH_DEVICE int stop(int n) const { return n + 1 == count() ? last - first : start(n + 1); }
};

// Add the weights of a step, which lie in shared memory and are overwritten, to the masses of their blocks. Each sum has an
// order that depends on the positions alone. Called by all threads, between barriers.
template <class T, int Rows, int Columns, int Pitch>
CUFLASH_DEVICE void add_masses(const MassGrid& grid, const BatchHead& batch_head,
                               tile::SharedTile<T, Rows, Columns, Pitch> p, int first_query, int last_query,
                               int first_key, int last_key) {
  const BlockCuts queries{first_query, last_query, static_cast<int>(grid.block_q)};
  const BlockCuts keys{first_key, last_key, static_cast<int>(grid.block_kv)};
  const auto mass = matrix<T>(grid.mass, batch_head, batch_head.head, 0, 0);
  const int num_keys = last_key - first_key;
  for (int sum = threadIdx.x; sum < queries.count() * num_keys; sum += tile::kThreads) {
    const int n = sum / num_keys, column = sum % num_keys, start = queries.start(n), stop = queries.stop(n);
    T total = 0;
    for (int row = start; row < stop; ++row) total += p.at(row, column);
    p.at(start, column) = total;
  }
  __syncthreads();  // the sums over queries are there
  for (int sum = threadIdx.x; sum < queries.count() * keys.count(); sum += tile::kThreads) {
    const int n = sum / keys.count(), m = sum % keys.count(), stop = keys.stop(m);
    T total = 0;
    for (int column = keys.start(m); column < stop; ++column) total += p.at(queries.start(n), column);
    mass.at(queries.first_block() + n, keys.first_block() + m) += total;
  }
}

}  // namespace cuflash::attention
