// Backward pass of standard attention: dk = dS^T q softmax_scale and dv = P^T do, summed over the query heads that
// share a key/value head. A thread block computes one tile of dk or of dv from all queries: both are the same product
// of different matrices.
#include <attention/config_simt.cuh>
#include <attention/naive_matrix.cuh>
#include <attention/score_gradient.cuh>
#include <naive/score_matrices.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::naive {

static_assert(kHeadDim == kValueDim, "dk and dv are made of tiles of one width");
using WeightTile = tile::SharedTile<Accumulator, kBlockQ, kBlockKv>;  // dS or P
using RowTile = tile::SharedTile<Accumulator, kBlockQ, kHeadDim>;  // tile of Q or dO
constexpr int kSharedBytes = kBytesOf<WeightTile, RowTile> + kBlockQ * static_cast<int>(sizeof(int));

}  // namespace cuflash::naive

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads)
naive_gradient_keys(const __grid_constant__ cuflash::attention::Params params,
                    const __grid_constant__ cuflash::naive::ScoreMatrices matrices) {
  using namespace cuflash;
  using namespace cuflash::naive;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const int num_of_keys = num_column_tiles(shape.head_dim, kHeadDim);
  const int num_parts = num_of_keys + num_column_tiles(shape.value_dim, kValueDim), part = split_index(num_parts);
  WorkTile work = key_tile(params, kBlockKv, num_parts);
  if (work.is_empty()) return;
  const bool is_of_keys = part < num_of_keys;
  const Matrices& weights = is_of_keys ? matrices.score_gradients : matrices.scores;
  const Matrices& other = is_of_keys ? params.q : params.do_;
  const int num_columns = is_of_keys ? shape.head_dim : shape.value_dim;
  const Range columns = column_tile(num_columns, kHeadDim, is_of_keys ? part : part - num_of_keys);
  const int first_head = work.batch_head.head;

  const WeightTile weight_smem{ptx::dynamic_shared<Accumulator>()};
  const RowTile row_smem{weight_smem.data + WeightTile::kElements};
  int* const is_row_valid = reinterpret_cast<int*>(row_smem.data + RowTile::kElements);
  tile::RegisterTile<Accumulator, kBlockKv, kHeadDim, kRun> sum;
  sum.fill(0);
  const Tiling query_tiles = query_tiling(params, kBlockQ);
  for (int head = first_head; head < first_head + shape.group_size; ++head) {
    work.batch_head.head = head;
    const auto weight = matrix<Accumulator>(weights, work.batch_head, head, shape.seqlen_q, shape.seqlen_kv)
                            .columns(work.first, work.last);
    const auto row_of = matrix<Element>(other, work.batch_head, head, shape.seqlen_q, num_columns)
                            .columns(columns.first, columns.last);
    const auto lse = matrix<Accumulator>(params.lse, work.batch_head, head, shape.seqlen_q, 1);
    for (int number = 0; number < query_tiles.num_tiles(); ++number) {
      const Range queries = query_tiles.tile(number);
      if (queries.is_empty()) continue;
      __syncthreads();  // all threads have read both operands of the last tile
      for (int row = threadIdx.x; row < kBlockQ; row += tile::kThreads)
        is_row_valid[row] = is_visiting_query(params, work.batch_head, queries, rows_of(work), queries.first + row) &&
                       lse.at(queries.first + row, 0) != ptx::negative_infinity<Accumulator>();
      tile::load(weight_smem, weight.rows(queries.first, queries.last));
      __syncthreads();  // all threads know which queries visit these keys
      tile::load(row_smem, row_of.rows(queries.first, queries.last), [&](int row) { return is_row_valid[row] != 0; });
      __syncthreads();  // both operands have arrived
      tile::gemm_add_tn(sum, weight_smem, row_smem);
    }
  }
  const int kv_head = first_head / shape.group_size;
  if (is_of_keys) {
    sum.scale(shape.softmax_scale);
    store_gradient_columns<Element>(params.dk, work, kv_head, shape.seqlen_kv, num_columns, columns.first, sum);
  } else {
    store_gradient_columns<Element>(params.dv, work, kv_head, shape.seqlen_kv, num_columns, columns.first, sum);
  }
}
