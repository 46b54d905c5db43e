// Backward of standard attention: dq = dS k softmax_scale. One block makes one tile of dq, from all keys.
#include <attention/config_simt.cuh>
#include <attention/naive_matrix.cuh>
#include <attention/score_gradient.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

// Four blocks a multiprocessor: without this bound, ptxas 13.0 spills registers in some specifications for more blocks.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_gradient_queries(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const int num_parts = num_column_tiles(shape.head_dim, kHeadDim);
  const WorkTile work = query_tile(params, kBlockQ, num_parts);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const Range columns = column_tile(shape.head_dim, kHeadDim, split_index(num_parts));
  const auto ds = matrix<Accumulator>(params.naive.score_gradients, batch_head, batch_head.head, shape.seqlen_q,
                                      shape.seqlen_kv)
                      .rows(work.first, work.last);
  const auto k = matrix<Element>(params.k, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                 shape.head_dim)
                     .columns(columns.first, columns.last);

  const PTile ds_smem{ptx::dynamic_shared<Accumulator>()};
  const KTile k_smem{ds_smem.data + PTile::kElements};
  int* const is_row_valid = reinterpret_cast<int*>(k_smem.data + KTile::kElements);
  tile::RegisterTile<Accumulator, kBlockQ, kHeadDim, kRun> dq;
  dq.fill(0);
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  for (int number = 0; number < key_tiles.num_tiles(); ++number) {
    const Range keys = key_tiles.tile(number);
    if (keys.is_empty()) continue;
    __syncthreads();  // dS and K of the last tile are read
    for (int row = threadIdx.x; row < kBlockKv; row += tile::kThreads)
      is_row_valid[row] = is_visited_key(params, batch_head, rows_of(work), keys, keys.first + row);
    tile::load(ds_smem, ds.columns(keys.first, keys.last));
    __syncthreads();  // it is known which keys are visited
    tile::load(k_smem, k.rows(keys.first, keys.last), [&](int row) { return is_row_valid[row] != 0; });
    __syncthreads();  // dS and K have arrived
    tile::gemm_add_nn(dq, ds_smem, k_smem);
  }
  dq.scale(shape.softmax_scale);
  store_gradient_columns<Element>(params.dq, work, batch_head.head, shape.seqlen_q, shape.head_dim, columns.first, dq);
}
