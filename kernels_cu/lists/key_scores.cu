// Computes the scores of queries and single keys, in base 2, and for each query and run of keys the greatest score and
// the sum of the exponentials. A thread block computes kBlockQ queries and a run of kBlockKv keys, so that even a few
// queries occupy a whole GPU. Columns are processed in chunks of kHeadDim. A causal mask sets scores to -inf.
#include <lists/selection.cuh>
#include <ptx/shared.cuh>
#include <tile/copy.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::lists {

using Accumulator = Config::Accumulator;
using Element = Config::Element;
constexpr int kBlockKv = Config::kBlockKv;
constexpr int kBlockQ = Config::kBlockQ;
constexpr int kHeadDim = Config::kHeadDim;

using QTile = tile::SharedTile<Accumulator, kBlockQ, kHeadDim>;
using KTile = tile::SharedTile<Accumulator, kBlockKv, kHeadDim>;
using Rows = tile::Matrix<const Element>;

// Return the rows of a matrix; `matrix` counts the heads of all batch entries, and `group_size` heads share the rows.
CUFLASH_DEVICE Rows rows_of(const StridedRows& rows, const KeyScores& params, int64_t matrix, int group_size,
                            int num_rows) {
  int64_t start = matrix % params.num_heads / group_size * rows.head_stride;
  matrix /= params.num_heads;
  for (int axis = 2; axis >= 0; --axis) {
    start += matrix % params.batch[axis] * rows.batch_strides[axis];
    matrix /= params.batch[axis];
  }
  const Element* const data = static_cast<const Element*>(rows.data) + start;
  return {data, rows.row_stride, rows.column_stride, num_rows, params.num_columns};
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads)
lists_key_scores(const __grid_constant__ cuflash::lists::KeyScores params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int num_runs = (params.num_keys + kBlockKv - 1) / kBlockKv, run = blockIdx.x % num_runs;
  const int num_tiles = (params.num_rows + kBlockQ - 1) / kBlockQ;
  const int64_t matrix = blockIdx.x / num_runs / num_tiles;
  const int first_row = blockIdx.x / num_runs % num_tiles * kBlockQ;
  const int last_row = min(first_row + kBlockQ, params.num_rows);
  const int first_key = run * kBlockKv, last_key = min(first_key + kBlockKv, params.num_keys);
  const Rows q = rows_of(params.q, params, matrix, 1, params.num_rows).rows(first_row, last_row);
  const Rows k = rows_of(params.k, params, matrix, params.group_size, params.num_keys).rows(first_key, last_key);
  const QTile q_smem{ptx::dynamic_shared<Accumulator>()};
  const KTile k_smem{q_smem.data + QTile::kElements};

  tile::RegisterTile<Accumulator, kBlockQ, kBlockKv> s;
  s.fill(0);
  for (int first = 0; first < params.num_columns; first += kHeadDim) {
    const int last = min(first + kHeadDim, params.num_columns);
    __syncthreads();  // all threads have read the previous chunk
    tile::load(q_smem, q.columns(first, last));
    tile::load(k_smem, k.columns(first, last));
    __syncthreads();  // the chunk has arrived
    tile::gemm_add_nt(s, q_smem, k_smem);
  }
  s.scale(static_cast<Accumulator>(params.scale_log2));

  constexpr int kRows = decltype(s)::kRows, kColumns = decltype(s)::kColumns;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + s.row(i);
    Accumulator greatest = ptx::negative_infinity<Accumulator>();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int key = first_key + s.column(j);
      if (key >= last_key || (params.is_causal && key > row + params.first_diagonal_key))
        s.at[i][j] = ptx::negative_infinity<Accumulator>();
      greatest = tile::maximum(greatest, s.at[i][j]);
    }
    greatest = tile::row_max(greatest);
    const Accumulator shift = greatest == ptx::negative_infinity<Accumulator>() ? Accumulator(0) : greatest;
    Accumulator sum = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum += ptx::exp2_accurate(s.at[i][j] - shift);
    sum = tile::row_sum(sum);
    if (tile::is_row_leader() && row < last_row)
      static_cast<KeyRun*>(params.runs)[(matrix * params.num_rows + row) * num_runs + run] = {greatest, sum};
  }
  Accumulator* const scores =
      static_cast<Accumulator*>(params.scores) + (matrix * params.num_rows + first_row) * params.num_keys + first_key;
  tile::store(tile::Matrix<Accumulator>{scores, params.num_keys, 1, last_row - first_row, last_key - first_key}, s);
}

static_assert(cuflash::tile::kThreads == cuflash::lists::kSelectionThreads, "all threads of a launch share the tiles");
