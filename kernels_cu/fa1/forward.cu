// FlashAttention-1's forward pass (arXiv 2205.14135, algorithms 1 and 5) on the tensor cores of Ampere. A thread block
// works on one head. Its outer loop holds a tile of K and V in shared memory, and its inner loop visits the tiles of
// queries that attend these keys. Each inner iteration reads O, l and m of a tile of queries from global memory and
// writes them back.
#include <fa1/running.cuh>
#include <ptx/cp_async.cuh>
#include <tile/epilogue.cuh>

namespace cuflash::fa1 {

constexpr int kNumStages = Config::kNumStages;

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Output = tile::WarpTile<kRowTiles, kValueDim / 8, kNumWarps>;
using Softmax = attention::LazySoftmax<Scores::kRows>;

constexpr KTile k_smem{0};
constexpr VTile v_smem{KTile::kBytes};
constexpr int kQOffset = v_smem.start + VTile::kBytes;  // stages of Q

constexpr int kStateOffset = kQOffset + kNumStages * QTile::kBytes;

// m and l of a query in global memory.
struct alignas(8) Statistics {
  float row_max, row_sum;
};

CUFLASH_DEVICE Statistics& statistics_of(const Running& running, const attention::BatchHead& batch_head,
                                         int query) {
  const auto all = attention::matrix<float>(running.running_statistics, batch_head, batch_head.head, 0, 2);
  return reinterpret_cast<Statistics&>(all.at(query, 0));
}

// The factors of a thread's rows by which an inner iteration scales O and the added product. Rows that attend no key in
// an iteration are skipped, so that the bits of their O, l and m stay the same.
struct TurnFactors {
  float old_o[Scores::kRows], new_o[Scores::kRows];
  bool is_skipped[Scores::kRows];
};

// Replace scores by exp(S - m~) and update m and l of their rows: lines 10 and 11 of algorithm 1. Scores are products q
// k^T, and the exponent includes the scale times log2(e).
CUFLASH_DEVICE TurnFactors update_softmax(Scores& s, Statistics (&rows)[Scores::kRows], float softmax_scale_log2) {
  TurnFactors factors;
  // avoids -inf - (-inf), which is NaN
  const auto finite = [](float x) { return x == ptx::negative_infinity<float>() ? 0 : x; };
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    float tile_max = ptx::negative_infinity<float>(), tile_sum = 0;
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) tile_max = fmaxf(tile_max, s.at(i, j));
    tile_max = tile::quad_max(tile_max);
    const float shift = finite(tile_max);
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) {
      s.at(i, j) = ptx::exp2_approx((s.at(i, j) - shift) * softmax_scale_log2);
      tile_sum += s.at(i, j);
    }
    tile_sum = tile::quad_sum(tile_sum);
    factors.is_skipped[i] = tile_max == ptx::negative_infinity<float>() && tile_sum == 0;  // a sum may be NaN here
    const float row_max = fmaxf(rows[i].row_max, tile_max);
    const float old_sum = ptx::exp2_approx((rows[i].row_max - finite(row_max)) * softmax_scale_log2) * rows[i].row_sum;
    const float tile_factor = ptx::exp2_approx((shift - finite(row_max)) * softmax_scale_log2);
    const float row_sum = old_sum + tile_factor * tile_sum;
    if (factors.is_skipped[i]) continue;
    factors.old_o[i] = old_sum * ptx::reciprocal_approx(row_sum);
    factors.new_o[i] = tile_factor * ptx::reciprocal_approx(row_sum);
    rows[i] = {row_max, row_sum};
  }
  return factors;
}

// Start copying the queries of an inner iteration.
CUFLASH_DEVICE void load_q(const attention::Params& params, const attention::BatchHead& batch_head,
                           const attention::KvBlock& queries, int stage) {
  const auto q = attention::matrix<Element>(params.q, batch_head, batch_head.head, params.shape.seqlen_q,
                                            params.shape.head_dim);
  tile::load_async<kThreads>(QTile{kQOffset + stage * QTile::kBytes}, q.rows(queries.start, queries.stop));
}

// Run one inner iteration, lines 8 to 13 of algorithm 1: add a tile of keys to O, l and m of a tile of queries.
CUFLASH_DEVICE void add_keys(const attention::Params& params, const Running& running,
                             const attention::WorkTile& keys, const attention::KvBlock& queries, QTile q_smem,
                             float softmax_scale_log2) {
  using namespace attention;
  const BatchHead& batch_head = keys.batch_head;
  const auto sums = sums_of_tile<Output>(params, running.running_o, batch_head, queries.start);
  Statistics rows[Scores::kRows];
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const int query = queries.start + Scores::first_row() + Scores::row(i);
    rows[i] = {ptx::negative_infinity<float>(), 0};
    if (query < queries.stop) rows[i] = statistics_of(running, batch_head, query);
  }
  Scores s;
  tile::gemm_nt(s, q_smem, k_smem);
  if (Softmax::needs_negation(params.shape.softmax_scale)) Softmax::negate(s, params.shape.softmax_scale);
  if (!fills_tiles(keys, queries)) mask_iteration(s, params, keys, queries, ptx::negative_infinity<float>());
  const TurnFactors factors = update_softmax(s, rows, softmax_scale_log2);
  Output o, added;
  sums.load(o);
  added.fill(0);
  tile::gemm_add_nn(added, s, v_smem);
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Output::kColumns; ++j)
      if (!factors.is_skipped[i]) o.at(i, j) = factors.old_o[i] * o.at(i, j) + factors.new_o[i] * added.at(i, j);
  sums.store(o);
  __syncwarp();  // the four threads of a row have read its m and l
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const int query = queries.start + Scores::first_row() + Scores::row(i);
    if (Scores::first_column() == 0 && query < queries.stop) statistics_of(running, batch_head, query) = rows[i];
  }
}

// Set O = 0, l = 0 and m = -inf: line 2 of algorithm 1.
CUFLASH_DEVICE void clear_running(const attention::Params& params, const Running& running,
                                  const attention::BatchHead& batch_head) {
  clear_sums(params, running.running_o, batch_head, kBlockQ * kValueDim);
  for (int query = threadIdx.x; query < params.shape.seqlen_q; query += kThreads)
    statistics_of(running, batch_head, query) = {ptx::negative_infinity<float>(), 0};
}

// Write O in the dtype of the operands, and the natural log-sum-exp of each row; rows without a key have 0 and -inf.
CUFLASH_DEVICE void write_results(const attention::Params& params, const Running& running,
                                  const attention::BatchHead& batch_head, float softmax_scale_log2) {
  using namespace attention;
  const Shape& shape = params.shape;
  const auto to = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  const auto lse = matrix<float>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);
  const Tiling query_tiles = query_tiling(params, kBlockQ);
  for (int number = 0; number < query_tiles.num_tiles(); ++number) {
    const Range queries = query_tiles.tile(number);
    if (queries.is_empty()) continue;
    Output o;
    sums_of_tile<Output>(params, running.running_o, batch_head, queries.first).load(o);
    tile::store(to.rows(queries.first, queries.last), o);
  }
  for (int query = threadIdx.x; query < shape.seqlen_q; query += kThreads) {
    const Statistics row = statistics_of(running, batch_head, query);
    const bool is_empty = row.row_max == ptx::negative_infinity<float>() && row.row_sum == 0;
    lse.at(query, 0) = ptx::fma(row.row_max, softmax_scale_log2 * static_cast<float>(kLn2),
                                ptx::log_accurate(is_empty ? 1 : row.row_sum));
  }
}
constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(BlockState));

}  // namespace cuflash::fa1

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
fa1_forward(const __grid_constant__ cuflash::attention::Params params,
            const __grid_constant__ cuflash::fa1::Running running) {
  using namespace cuflash;
  using namespace cuflash::fa1;
  using namespace cuflash::attention;
  auto& state = *reinterpret_cast<BlockState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  const BatchHead batch_head = own_batch_head(params);
  const float softmax_scale_log2 = Softmax::scale_log2(params.shape.softmax_scale);
  clear_running(params, running, batch_head);
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  for (int number = 0; number < key_tiles.num_tiles(); ++number) {
    const Range range = key_tiles.tile(number);
    if (range.is_empty()) continue;
    __syncthreads();  // O, l and m are written; all threads have read K, V, Q and the state of the last keys
    begin_keys(params, {batch_head, range.first, range.last}, state);
    __syncthreads();  // the state is stored
    const WorkTile& keys = state.keys;
    BlockIterator<kBlockQ, OverQBlocks, Listed> blocks(params, state.visit_range);
    KvBlock block, next_block;
    bool has_block = blocks.next(block);
    if (!has_block) continue;
    load_visible_rows(params, keys, k_smem, params.k, params.shape.head_dim);
    load_visible_rows(params, keys, v_smem, params.v, params.shape.value_dim);
    load_q(params, keys.batch_head, block, 0);
    ptx::cp_async_commit();
    for (int stage = 0; has_block; stage = kNumStages - 1 - stage) {
      const bool has_next_block = blocks.next(next_block);
      ptx::cp_async_wait<0>();
      __syncthreads();  // Q has arrived, and K and V before the first iteration; all threads have read the last Q
      if (kNumStages == 2 && has_next_block) load_q(params, keys.batch_head, next_block, 1 - stage);
      ptx::cp_async_commit();
      add_keys(params, running, keys, block, QTile{kQOffset + stage * QTile::kBytes}, softmax_scale_log2);
      if (kNumStages == 1) {
        __syncthreads();  // all warps have read Q
        if (has_next_block) load_q(params, keys.batch_head, next_block, 0);
        ptx::cp_async_commit();
      }
      block = next_block;
      has_block = has_next_block;
    }
  }
  __syncthreads();  // O, l and m are written
  write_results(params, running, batch_head, softmax_scale_log2);
}
