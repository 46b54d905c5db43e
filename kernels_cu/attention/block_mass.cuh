#pragma once
#include <attention/mass_grid.cuh>
#include <tile/gemm_simt.cuh>

// Sums of softmax weights over the blocks of a grid, from weights in shared memory.
namespace cuflash::attention {

// Add the weights of a step to the masses of their blocks. The weights are in shared memory and are overwritten. The
// order of each sum depends only on the positions. Called by all threads, between barriers.
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
  __syncthreads();  // the sums over queries are stored
  for (int sum = threadIdx.x; sum < queries.count() * keys.count(); sum += tile::kThreads) {
    const int n = sum / keys.count(), m = sum % keys.count(), stop = keys.stop(m);
    T total = 0;
    for (int column = keys.start(m); column < stop; ++column) total += p.at(queries.start(n), column);
    mass.at(queries.first_block() + n, keys.first_block() + m) += total;
  }
}

}  // namespace cuflash::attention
