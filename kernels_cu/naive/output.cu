// Standard attention, third of three kernels: o = P v. One block makes one tile of o, from all keys.
#include <attention/config_simt.cuh>
#include <attention/naive_matrix.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

// Four blocks a multiprocessor: without this bound, ptxas 13.0 spills registers in some specifications for more blocks.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_output(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const int num_parts = num_column_tiles(shape.value_dim, kValueDim);
  const WorkTile work = query_tile(params, kBlockQ, num_parts);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const Range columns = column_tile(shape.value_dim, kValueDim, split_index(num_parts));
  const auto p = matrix<Accumulator>(params.naive.scores, batch_head, batch_head.head, shape.seqlen_q, shape.seqlen_kv)
                     .rows(work.first, work.last);
  const auto v = matrix<Element>(params.v, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                 shape.value_dim)
                     .columns(columns.first, columns.last);
  const auto to = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim)
                      .rows(work.first, work.last).columns(columns.first, columns.last);

  const PTile p_smem{ptx::dynamic_shared<Accumulator>()};
  const VTile v_smem{p_smem.data + PTile::kElements};
  int* const is_row_valid = reinterpret_cast<int*>(v_smem.data + VTile::kElements);
  tile::RegisterTile<Accumulator, kBlockQ, kValueDim, kRun> o;
  o.fill(0);
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  for (int number = 0; number < key_tiles.num_tiles(); ++number) {
    const Range keys = key_tiles.tile(number);
    if (keys.is_empty()) continue;
    __syncthreads();  // P and V of the last tile are read
    for (int row = threadIdx.x; row < kBlockKv; row += tile::kThreads)
      is_row_valid[row] = is_visited_key(params, batch_head, rows_of(work), keys, keys.first + row);
    tile::load(p_smem, p.columns(keys.first, keys.last));
    __syncthreads();  // it is known which keys are visited
    tile::load(v_smem, v.rows(keys.first, keys.last), [&](int row) { return is_row_valid[row] != 0; });
    __syncthreads();  // P and V have arrived
    tile::gemm_add_nn(o, p_smem, v_smem);
  }
  tile::store(to, o);
}
