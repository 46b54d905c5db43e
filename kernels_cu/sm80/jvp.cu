// The tangents of o and lse, from the o and lse that the forward pass wrote, on the tensor cores of Ampere. A thread
// block works on one tile of queries and visits their keys as the forward pass does; each warp keeps its rows of S,
// S_dot and O_dot in registers. K of the next step and its tangent are copied while the weights of this step are
// computed, V and its tangent while the scores are multiplied. Results are bitwise reproducible.
// score_gradient_mma.cuh is included first, since the `probability` with the approximate exponential must be declared
// before it is used.
#include <attention/score_gradient_mma.cuh>
#include <attention/config_mma.cuh>
#include <attention/dropout.cuh>
#include <attention/tangent_weights.cuh>
#include <ptx/cp_async.cuh>
#include <sm80/block_state.cuh>
#include <sm80/tangent_tiles.cuh>

namespace cuflash::sm80 {

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Output = tile::WarpTile<kRowTiles, kValueDim / 8, kNumWarps>;
using Rows = attention::RowTangents<float, Scores::kRows>;

constexpr QTile q_smem{0};
constexpr OTile o_smem{0};  // overwrites Q, once all threads have read it
constexpr QTile q_dot_smem{QTile::kBytes > OTile::kBytes ? QTile::kBytes : OTile::kBytes};
constexpr KTile k_smem{q_dot_smem.start + QTile::kBytes * Config::kHasQDot};
constexpr KTile k_dot_smem{k_smem.start + KTile::kBytes};
constexpr VTile v_smem{k_dot_smem.start + KTile::kBytes * Config::kHasKDot};
constexpr VTile v_dot_smem{v_smem.start + VTile::kBytes * attention::kMovesScores};
constexpr int kStateOffset = v_dot_smem.start + VTile::kBytes * Config::kHasVDot;

// State of a thread block in shared memory.
struct TangentState {
  BlockState block;
  Element* k_dot;
  Element* v_dot;
};
constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(TangentState));

// Start copying K and its tangent. The second function does so for V and its tangent.
CUFLASH_DEVICE void load_k(const attention::Params& params, const attention::Tangents& tangents,
                           const TangentState& state, const attention::KvBlock& block) {
  const int columns = params.shape.head_dim;
  load_rows(k_smem, state.block.k, params.k, columns, block, state.block.rows_fill_tiles);
  if constexpr (Config::kHasKDot)
    load_rows(k_dot_smem, state.k_dot, tangents.k_dot, columns, block, state.block.rows_fill_tiles);
}
CUFLASH_DEVICE void load_v(const attention::Params& params, const attention::Tangents& tangents,
                           const TangentState& state, const attention::KvBlock& block) {
  const int columns = params.shape.value_dim;
  if constexpr (attention::kMovesScores)
    load_rows(v_smem, state.block.v, params.v, columns, block, state.block.rows_fill_tiles);
  if constexpr (Config::kHasVDot)
    load_rows(v_dot_smem, state.v_dot, tangents.v_dot, columns, block, state.block.rows_fill_tiles);
}

// Store the tile of the block, and the addresses of keys and values. Called by one thread.
CUFLASH_DEVICE void save_state(const attention::Params& params, const attention::Tangents& tangents,
                               const attention::WorkTile& work, const attention::VisitRange& visit_range,
                               TangentState& state) {
  using namespace attention;
  const Shape& shape = params.shape;
  const int kv_head = divmod(work.batch_head.head, shape.group_size).quotient;
  bool rows_fill_tiles = true;
  const auto start = [&](auto tile, const Matrices& matrices, int columns) {
    Element* const data = matrix<Element>(matrices, work.batch_head, kv_head, 0, 0).data;
    rows_fill_tiles &= has_full_rows<decltype(tile)>(data, matrices, columns);
    return data;
  };
  state.block.k = start(KTile{0}, params.k, shape.head_dim);
  if constexpr (kMovesScores) state.block.v = start(VTile{0}, params.v, shape.value_dim);
  if constexpr (Config::kHasKDot) state.k_dot = start(KTile{0}, tangents.k_dot, shape.head_dim);
  if constexpr (Config::kHasVDot) state.v_dot = start(VTile{0}, tangents.v_dot, shape.value_dim);
  state.block.work = work;
  state.block.visit_range = visit_range;
  state.block.softmax_scale_log2 = (kHasScore ? 1.0 : shape.softmax_scale) * kLog2E;
  state.block.rows_fill_tiles = rows_fill_tiles;
}

// Replace scores by weights and their tangents, as `weights_and_tangents` does.
CUFLASH_DEVICE void update(Scores& s, Scores& s_dot, Rows& rows, const score::Function& score_function,
                           const attention::Params& params, const BlockState& state, const attention::KvBlock& block) {
  using namespace attention;
  const float scale = params.shape.softmax_scale;
  if constexpr (kHasScore && kMovesScores) {
    if constexpr (!Config::kHasQDot && !Config::kHasKDot) s_dot.fill(0);
    score_tangents_of_queries(s, s_dot, score_function, scale, state.work, block);
  } else if constexpr (kHasScore) {
    score_of_queries(s, score_function, scale, state.work, block, 1.0);
  }
  const auto row_sum = [](float x) { return tile::quad_sum(x); };
  const float of_tangents = kHasScore ? 1.0f : scale;
  if (is_unmasked<kBlockKv>(block)) {
    weights_and_tangents<false>(s, s_dot, rows, state.softmax_scale_log2, of_tangents,
                                [](int, int) { return true; }, row_sum);
  } else {
    mask_scores<Config::kIsListed>(s, params, state.work, block, masked_score());
    weights_and_tangents<true>(s, s_dot, rows, state.softmax_scale_log2, of_tangents,
                               [&](int i, int j) { return !is_masked_score(s.at(i, j)); }, row_sum);
  }
}

// Set dropped weights, and their tangents, to 0.
CUFLASH_DEVICE void drop_step(Scores& s, Scores& s_dot, const attention::Params& params, const BlockState& state,
                              int first_key, attention::DropoutArgument<Config> dropout) {
  using namespace attention;
  if constexpr (Config::kHasDropout) {
    const WorkTile& work = state.work;
    const auto kept = kept_fragments<false>(
        s, Draws(dropout), head_number(params.shape, work.batch_head, work.batch_head.head), work.first, first_key);
    drop_weights(s, kept);
    if constexpr (kMovesScores) drop_weights(s_dot, kept);
  }
}

// Write lse_dot, and O_dot through the shared memory of Q.
CUFLASH_DEVICE void write_results(const attention::Params& params, const attention::Tangents& tangents,
                                  const attention::WorkTile& work, Rows& rows, Output& o_dot,
                                  attention::SinkArgument<Config> sink, attention::DropoutArgument<Config> dropout) {
  using namespace attention;
  const Shape& shape = params.shape;
  const BatchHead& batch_head = work.batch_head;
  const int head = batch_head.head;
  const auto of_tile = [&](auto element, const Matrices& x, int columns) {
    return matrix<decltype(element)>(x, batch_head, head, shape.seqlen_q, columns).rows(work.first, work.last);
  };
  const auto lse = of_tile(0.0f, params.lse, 1), lse_dot = of_tile(0.0f, tangents.lse_dot, 1);
  const auto o = of_tile(Element{}, params.o, shape.value_dim);
  const int first_row = o_dot.first_row(), first_column = o_dot.first_column();
  if constexpr (Config::kHasDropout) o_dot.scale(dropout.single_factor);
#pragma unroll
  for (int i = 0; i < o_dot.kRows; ++i) {
    const int row = first_row + o_dot.row(i);
    const bool in_bounds = row < lse.num_rows;
    const auto result = row_result(tile::quad_sum(rows.sum[i]), rows.center[i], rows.has_key >> i & 1,
                                   in_bounds ? lse.at(row, 0) : 0.0f, sink, tangents, batch_head, head);
#pragma unroll
    for (int j = 0; j < o_dot.kColumns; ++j) {
      const int column = first_column + o_dot.column(j);
      const bool is_read = (kMovesScores || Config::kHasSinkDot) && in_bounds && column < o.num_columns;
      o_dot.at(i, j) = result.o_dot(o_dot.at(i, j), is_read ? ptx::to_float(o.at(row, column)) : 0.0f);
    }
    if (first_column == 0 && in_bounds) lse_dot.at(row, 0) = result.lse_dot;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q has arrived, even without a step, and all threads have read it
  tile::store(o_smem, o_dot);
  __syncthreads();  // all of O_dot is stored
  tile::store<kThreads>(of_tile(Element{}, tangents.o_dot, shape.value_dim), o_smem);
}

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_jvp(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile<Listed>(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  // computed first, since loads from a list have a high latency
  const VisitRange visit_range = visit_range_of_queries(params, work);
  const auto of_queries = [&](const Matrices& x) {
    return matrix<Element>(x, batch_head, batch_head.head, shape.seqlen_q, shape.head_dim).rows(work.first, work.last);
  };
  tile::load_async<kThreads>(q_smem, of_queries(params.q));
  if constexpr (Config::kHasQDot) tile::load_async<kThreads>(q_dot_smem, of_queries(tangents.q_dot));
  auto& state = *reinterpret_cast<TangentState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  if (threadIdx.x == 0) save_state(params, tangents, work, visit_range, state);
  const auto lse =
      matrix<float>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1).rows(work.first, work.last);
  Rows rows(lse, [](int i) { return Scores::first_row() + Scores::row(i); });
  Output o_dot;
  o_dot.fill(0);
  __syncthreads();  // the state is stored
  BlockIterator<kBlockKv, OverKvBlocks, Listed> blocks(params, state.block.visit_range);
  KvBlock block, next_block;
  bool has_block = blocks.next(block);
  if (has_block) load_k(params, tangents, state, block);
  ptx::cp_async_commit();
  while (has_block) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K has arrived, and Q before the first step; all threads have read V of the last step
    load_v(params, tangents, state, block);
    ptx::cp_async_commit();
    Scores s, s_dot;
    multiply_with_tangents<Config::kHasQDot, Config::kHasKDot>(s, s_dot, q_smem, q_dot_smem, k_smem, k_dot_smem);
    ptx::cp_async_wait<0>();
    __syncthreads();  // V has arrived; all threads have read K
    has_block = blocks.next(next_block);
    if (has_block) load_k(params, tangents, state, next_block);
    ptx::cp_async_commit();
    update(s, s_dot, rows, score_function, params, state.block, block);
    drop_step(s, s_dot, params, state.block, block.start, dropout);
    if constexpr (kMovesScores) tile::gemm_add_nn(o_dot, s_dot, v_smem);
    if constexpr (Config::kHasVDot) tile::gemm_add_nn(o_dot, s, v_dot_smem);
    block = next_block;
  }
  write_results(params, tangents, state.block.work, rows, o_dot, sink, dropout);
}
