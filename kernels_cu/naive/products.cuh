#pragma once
#include <attention/config_simt.cuh>
#include <attention/naive_matrix.cuh>
#include <naive/score_matrices.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

// Products of whole matrices in naive kernels, tile by tile through shared memory.
namespace cuflash::naive {

// Add a b^T to c, where the rows of a are a tile of queries and the rows of b a tile of keys, in chunks of Width
// columns. Called by all threads.
template <int Width, class Sum>
CUFLASH_DEVICE void add_product_of_rows(Sum& c, const tile::Matrix<Element>& a, const tile::Matrix<Element>& b) {
  using ATile = tile::SharedTile<Accumulator, kBlockQ, Width>;
  const ATile a_smem{ptx::dynamic_shared<Accumulator>()};
  const tile::SharedTile<Accumulator, kBlockKv, Width> b_smem{a_smem.data + ATile::kElements};
  for (int first = 0; first < a.num_columns; first += Width) {
    const int last = min(first + Width, a.num_columns);
    __syncthreads();  // all threads have read the last columns
    tile::load(a_smem, a.columns(first, last));
    tile::load(b_smem, b.columns(first, last));
    __syncthreads();  // the columns have arrived
    tile::gemm_add_nt(c, a_smem, b_smem);
  }
}

// Add the product of a tile's weights [queries, keys] and `rows` [keys, at most Width columns] to c. Rows of keys that
// no query of the tile visits count as 0. Called by all threads.
template <int Width, class Sum>
CUFLASH_DEVICE void add_weighted_rows(Sum& c, const attention::Params& params, const attention::WorkTile& work,
                                      const tile::Matrix<Accumulator>& weights, const tile::Matrix<Element>& rows) {
  using namespace attention;
  using RowTile = tile::SharedTile<Accumulator, kBlockKv, Width>;
  const PTile weight_smem{ptx::dynamic_shared<Accumulator>()};
  const RowTile row_smem{weight_smem.data + PTile::kElements};
  int* const is_row_valid = reinterpret_cast<int*>(row_smem.data + RowTile::kElements);
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  for (int number = 0; number < key_tiles.num_tiles(); ++number) {
    const Range keys = key_tiles.tile(number);
    if (keys.is_empty()) continue;
    __syncthreads();  // all threads have read both operands of the last tile
    for (int row = threadIdx.x; row < kBlockKv; row += tile::kThreads)
      is_row_valid[row] = is_visited_key(params, work.batch_head, rows_of(work), keys, keys.first + row);
    tile::load(weight_smem, weights.columns(keys.first, keys.last));
    __syncthreads();  // all threads know which keys are visited
    tile::load(row_smem, rows.rows(keys.first, keys.last), [&](int row) { return is_row_valid[row] != 0; });
    __syncthreads();  // both operands have arrived
    tile::gemm_add_nn(c, weight_smem, row_smem);
  }
}

}  // namespace cuflash::naive
