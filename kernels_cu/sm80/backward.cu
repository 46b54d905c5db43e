// FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) on the tensor cores of Ampere. A thread block keeps
// a tile of keys and visits the blocks of queries that attend to it, over the query heads that share its key/value
// head. dK and dV stay in registers. Each step's product for dQ is added to sums in global memory, unless
// backward_rows.cu computes dQ.
#include <attention/column_parts.cuh>
#include <attention/dropout_gradient_mma.cuh>
#include <attention/empty_rows.cuh>
#include <attention/epilogue_mma.cuh>
#include <attention/fragment_slopes.cuh>
#include <attention/members.cuh>
#include <attention/members_slopes.cuh>
#include <attention/score_gradient_mma.cuh>
#include <ptx/cp_async.cuh>

namespace cuflash::sm80 {

constexpr int kNumStages = Config::kNumStages;

using ScorePartition = tile::WarpPartition<kBlockQ, kBlockKv, kNumWarps>;
using Scores = ScorePartition::Tile;
using WarpDk = tile::WarpPartition<kBlockKv, kHeadDim, kNumWarps>::Tile;
using WarpDv = tile::WarpPartition<kBlockKv, kValueDim, kNumWarps>::Tile;

constexpr bool kMakesPAndDsTogether = kHasScore || Config::kHasDropout;  // P and dS are computed together, after dP
static_assert(!Config::kHasDropout || !Config::kPacksQueries, "rows of several heads have no cells of drawn weights");
constexpr bool kIsNarrow = kHeadDim + kValueDim <= 256;
constexpr int kNumScores = Scores::kRows * Scores::kColumns;  // number of scores per thread
// P is computed while the tensor cores multiply dP, if elements have 16 bits and the registers hold both.
constexpr bool kOverlapsP = sizeof(Element) == 2 && kNumScores <= 32;
// P is also stored while dP is multiplied, and dS while dV is multiplied, which needs one more barrier, if the products
// are long enough. At 256 columns and 16384 tokens this saves 2.5 % of the backward pass.
constexpr bool kOverlapsDs =
    kOverlapsP && !kIsNarrow && kValueDim >= 64 && ScorePartition::kNumOwnerWarps == kNumWarps;
// P and dS are rounded and stored at once, which halves their registers, in separate code for masked and unmasked
// steps, if the registers cannot hold both for longer. This saves 6 % at 32 columns (step 8 of sm80_steps.log at commit
// b648872e).
constexpr bool kStoresScoresEarly = kOverlapsDs || (sizeof(Element) == 2 && kNumScores > 32);
// Warps test whether they are the first owner of their scores even if every warp is. With this test, ptxas orders the
// following instructions better, which saves 2 % of the backward pass at 128 columns without a list.
constexpr bool kChecksOwner = ScorePartition::kNumOwnerWarps < kNumWarps || (!Config::kIsListed && kNumScores <= 32);

constexpr KTile k_smem{0};
constexpr VTile v_smem{KTile::kBytes};
constexpr int kQOffset = v_smem.start + VTile::kBytes;  // stages of Q, followed by the stages of dO
constexpr int kDoOffset = kQOffset + kNumStages * QTile::kBytes;
constexpr PTile p_smem{kDoOffset + kNumStages * OTile::kBytes};
constexpr PTile ds_smem{p_smem.start + PTile::kBytes};
constexpr int kStatisticsOffset = ds_smem.start + PTile::kBytes;  // stages of lse and delta
constexpr int kStateOffset = kStatisticsOffset + kNumStages * 2 * kBlockQ * static_cast<int>(sizeof(float));

// State of a thread block: its tile and its current query head. The state is in shared memory, to leave registers for
// accumulators.
struct BlockState {
  attention::WorkTile work;
  attention::VisitRange visit_range;
  float softmax_scale_log2;
  bool rows_fill_tiles;  // whether rows of Q and dO have the number of columns of their tiles
  Element* q;
  Element* d_o;
  float* lse;
  float* delta;
  float* dq_sum;
};

// Start copying the rows of K that some query of the head attends. Other rows become 0: they may hold NaN, and the
// product dS K multiplies them by a dS of 0.
CUFLASH_DEVICE void load_k(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const Shape& shape = params.shape;
  const int head = divmod(work.batch_head.head, shape.group_size).quotient;
  const int first = interval(params, work.batch_head, 0).lo,
      last = interval(params, work.batch_head, shape.seqlen_q - 1).hi;
  const auto k = matrix<Element>(params.k, work.batch_head, head, shape.seqlen_kv, shape.head_dim);
  const auto visible_k = k.rows(work.first, max(work.first, min(work.last, last)));
  tile::load_async<kThreads>(k_smem, visible_k, first - work.first);
}

// Return the range of queries of the current head that visit the tile.
CUFLASH_DEVICE attention::VisitRange visit_range_of_head(const attention::Params& params,
                                                         attention::ChosenArgument<Config> chosen,
                                                         const attention::WorkTile& work) {
  const attention::VisitRange visit_range = attention::visit_range_of_keys(params, chosen, work);
  return Config::kPacksQueries ? visit_range : attention::aligned_to_tiles(params, visit_range, kBlockQ);
}

// Store the visit range of a query head, and the addresses of its matrices. Called by one thread.
CUFLASH_DEVICE void save_head_state(const attention::Params& params, const attention::BatchHead& batch_head,
                                    const attention::VisitRange& visit_range,
                                    BlockState& state) {
  using attention::matrix;
  state.visit_range = visit_range;
  state.q = matrix<Element>(params.q, batch_head, batch_head.head, 0, 0).data;
  state.d_o = matrix<Element>(params.do_, batch_head, batch_head.head, 0, 0).data;
  state.lse = matrix<float>(params.lse, batch_head, batch_head.head, 0, 0).data;
  state.delta = matrix<float>(params.delta, batch_head, batch_head.head, 0, 0).data;
  state.dq_sum = matrix<float>(params.dq_sum, batch_head, batch_head.head, 0, 0).data;
  state.rows_fill_tiles = has_full_rows<QTile>(state.q, params.q, params.shape.head_dim) &&
                  has_full_rows<OTile>(state.d_o, params.do_, params.shape.value_dim);
}

// Store the tile of the block, and start to copy its K and V. Return false if the tile is empty.
CUFLASH_DEVICE bool begin_tile(const attention::Params& params, attention::ChosenArgument<Config> chosen,
                               BlockState& state) {
  using namespace attention;
  const Shape& shape = params.shape;
  const WorkTile work = key_tile<Listed>(params, kBlockKv, parts_of_keys(chosen));
  if (work.is_empty() || !has_part_of_keys(params, chosen, work)) return false;
  // computed first, since loads from a list have a high latency
  const VisitRange visit_range = visit_range_of_head(params, chosen, work);
  const int kv_head = divmod(work.batch_head.head, shape.group_size).quotient;
  const auto v = matrix<Element>(params.v, work.batch_head, kv_head, shape.seqlen_kv, shape.value_dim);
  load_k(params, work);
  tile::load_async<kThreads>(v_smem, v.rows(work.first, work.last));
  if (threadIdx.x == 0) {
    state.work = work;
    state.softmax_scale_log2 = shape.softmax_scale * kLog2E;
    save_head_state(params, work.batch_head, visit_range, state);
  }
  return true;
}

// Advance to the next query head, or tile of heads, that shares the key/value head.
CUFLASH_DEVICE void begin_next_head(const attention::Params& params, attention::ChosenArgument<Config> chosen,
                                    BlockState& state) {
  __syncthreads();  // all threads have read the state of the last head
  if (threadIdx.x == 0) {
    state.work.batch_head.head += attention::heads_per_tile(chosen);
    save_head_state(params, state.work.batch_head, visit_range_of_head(params, chosen, state.work), state);
  }
}

// Return lse (if `which` is 0) or delta (if it is 1) of the queries in a stage.
CUFLASH_DEVICE tile::Matrix<float> statistics(int stage, int which, int num_rows) {
  float* const all = reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kStatisticsOffset);
  return {all + (2 * stage + which) * kBlockQ, 1, 1, num_rows, 1};
}

// Start copying a block with the number of queries of a tile, and with rows that fill the tiles. Narrow tiles leave
// enough registers to compute all addresses before the first copy.
CUFLASH_DEVICE void load_full_block(const attention::Params& params, const BlockState& state, int first, int stage) {
  using QRows = tile::FullTileCopy<kThreads, Element, kBlockQ, kHeadDim>;
  using DoRows = tile::FullTileCopy<kThreads, Element, kBlockQ, kValueDim>;
  // number of lse and delta values per thread
  constexpr int kStatisticsPerThread = (2 * kBlockQ + kThreads - 1) / kThreads;
  const auto statistic_address = [&](int number) {
    const bool is_lse = number < kBlockQ;
    const float* const column = is_lse ? state.lse : state.delta;
    return column + (first + number % kBlockQ) * (is_lse ? params.lse.row_stride : params.delta.row_stride);
  };
  const float* statistic = kIsNarrow ? statistic_address(threadIdx.x) : nullptr;
  const QRows q({kQOffset + stage * QTile::kBytes}, state.q + first * params.q.row_stride, params.q.row_stride);
  if (!kIsNarrow) q.start();
  const DoRows d_o({kDoOffset + stage * OTile::kBytes}, state.d_o + first * params.do_.row_stride,
                   params.do_.row_stride);
  if (kIsNarrow) q.start();
  d_o.start();
#pragma unroll
  for (int i = 0; i < kStatisticsPerThread; ++i) {
    const int number = threadIdx.x + i * kThreads;
    if (!kIsNarrow || i > 0) statistic = statistic_address(number);
    if (number < 2 * kBlockQ) ptx::cp_async_ca_4(ptx::shared_address(&statistics(stage, 0, 0).at(number, 0)),
                                                 statistic, 4);
  }
}

// Start copying a block with fewer queries than a tile, or with rows that do not fill the tiles.
CUFLASH_DEVICE void load_partial_block(const attention::Params& params, const BlockState& state,
                                       const attention::KvBlock& block,
                                       int stage) {
  const attention::Shape& shape = params.shape;
  tile::load_async<kThreads, false>(QTile{kQOffset + stage * QTile::kBytes},
                                    rows(state.q, params.q, shape.head_dim, block.start, block.stop));
  tile::load_async<kThreads, false>(OTile{kDoOffset + stage * OTile::kBytes},
                                    rows(state.d_o, params.do_, shape.value_dim, block.start, block.stop));
  const int num_rows = block.stop - block.start;
  tile::load_async<kThreads>(statistics(stage, 0, num_rows), rows(state.lse, params.lse, 1, block.start, block.stop));
  tile::load_async<kThreads>(statistics(stage, 1, num_rows),
                             rows(state.delta, params.delta, 1, block.start, block.stop));
}

// Start copying the query block of a step, if it exists.
CUFLASH_DEVICE void load_block(const attention::Params& params, attention::NoChosenLists, const BlockState& state,
                               bool in_bounds, const attention::KvBlock& block, int stage) {
  // with && instead of &, ptxas spills registers
  const bool is_full_block = in_bounds & state.rows_fill_tiles & (block.stop - block.start == kBlockQ);
  if (in_bounds && !is_full_block) load_partial_block(params, state, block, stage);
  if (__builtin_expect(is_full_block, true)) load_full_block(params, state, block.start, stage);
}
CUFLASH_DEVICE void load_block(const attention::Params& params, const attention::ChosenLists& chosen,
                               const BlockState& state, bool in_bounds, const attention::KvBlock& block, int stage) {
  if (!in_bounds) return;
  const attention::Shape& shape = params.shape;
  const int num_rows = attention::rows_of_step(chosen, block);
  const QTile q_smem{kQOffset + stage * QTile::kBytes};
  const OTile do_smem{kDoOffset + stage * OTile::kBytes};
  const auto q = attention::gathered_rows(chosen, block, state.q, params.q, shape.head_dim);
  const auto d_o = attention::gathered_rows(chosen, block, state.d_o, params.do_, shape.value_dim);
  if (__builtin_expect(state.rows_fill_tiles, true)) {
    tile::load_full_rows_async<kThreads>(q_smem, q);
    tile::load_full_rows_async<kThreads>(do_smem, d_o);
  } else {
    tile::load_async<kThreads>(q_smem, q);
    tile::load_async<kThreads>(do_smem, d_o);
  }
  const auto lse = attention::gathered_rows(chosen, block, state.lse, params.lse, 1);
  const auto delta = attention::gathered_rows(chosen, block, state.delta, params.delta, 1);
  for (int row = threadIdx.x; row < num_rows; row += kThreads) {
    ptx::cp_async_ca_4(ptx::shared_address(&statistics(stage, 0, num_rows).at(row, 0)), lse.row(row), 4);
    ptx::cp_async_ca_4(ptx::shared_address(&statistics(stage, 1, num_rows).at(row, 0)), delta.row(row), 4);
  }
}

// Store P and dS in shared memory.
CUFLASH_DEVICE void store_scores(const Scores& p, const Scores& ds) {
  if (kChecksOwner && !Scores::is_first_owner()) return;
  tile::store(p_smem, p);
  tile::store(ds_smem, ds);
}

// Compute P and dS of a step without a mask, and add P^T dO to dV. P is computed and stored while the tensor cores
// compute dP = dO V^T, and dS while they compute P^T dO.
template <class Row>
CUFLASH_DEVICE void add_dv_overlapped(WarpDv& dv, Scores& s, OTile do_smem, float softmax_scale_log2, const Row& row) {
  constexpr int kNumKSteps = kBlockQ / 16;
  Scores dp;
  attention::overlap_probabilities_with_dp(s, dp, do_smem, v_smem, softmax_scale_log2, row,
                                           [&](int column_tile) { tile::store_columns(p_smem, s, column_tile); });
  __syncthreads();  // all of P is stored
  tile::gemm_add_tn(dv, p_smem, do_smem, [&](int k_step) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      if (j * kNumKSteps / Scores::kColumnTiles != k_step) continue;
      attention::score_gradient_columns(dp, s, row, j);
      tile::store_columns(ds_smem, dp, j);
    }
  });
}

// Compute P and dS of a step in which all queries see all keys, from the products S.
CUFLASH_DEVICE void make_scores_of_full_step(WarpDv& dv, Scores& s, Scores& dp, OTile do_smem,
                                             const tile::Matrix<float>& lse, const tile::Matrix<float>& delta,
                                             const BlockState& state) {
  using namespace attention;
  const auto row = row_statistics<Scores>(lse, delta);
  const float softmax_scale_log2 = state.softmax_scale_log2;
  if constexpr (kOverlapsDs) {
    add_dv_overlapped(dv, s, do_smem, softmax_scale_log2, row);
  } else if constexpr (kOverlapsP) {
    overlap_probabilities_with_dp(s, dp, do_smem, v_smem, softmax_scale_log2, row);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) score_gradient_columns(dp, s, row, j);
  } else {
    tile::gemm_nt(dp, do_smem, v_smem);
    score_gradients<false>(s, dp, softmax_scale_log2, row);
    if (kStoresScoresEarly) store_scores(s, dp);
  }
}

// Add the product of dS and K to the sums of dQ.
CUFLASH_DEVICE void add_dq(const attention::Params& params, attention::NoChosenLists, const BlockState& state,
                           const attention::KvBlock& block) {
  using namespace attention;
  WarpDq dq;
  tile::gemm_nn(dq, ds_smem, k_smem);
  DqSumLayout(state.dq_sum + query_tile_number(params, block.start, kBlockQ) * params.dq_sum.row_stride)
      .atomic_add(dq);
}
CUFLASH_DEVICE void add_dq(const attention::Params& params, const attention::ChosenLists& chosen,
                           const BlockState& state, const attention::KvBlock& block) {
  WarpDq dq;
  tile::gemm_nn(dq, ds_smem, k_smem);
  DqSumRows::atomic_add(attention::gathered_rows(chosen, block, state.dq_sum, dq_sum_rows(params), kHeadDim), dq);
}

// Replace q k^T of a step by P, and dP by dS, in kernels with a score function or dropout.
CUFLASH_DEVICE void make_changed_p_and_ds(Scores& s, Scores& dp, const attention::Params& params,
                                          const BlockState& state, const attention::KvBlock& block, bool is_masked,
                                          const tile::Matrix<float>& lse, const tile::Matrix<float>& delta,
                                          const score::Function& score_function,
                                          attention::DropoutArgument<Config> dropout,
                                          attention::ChosenArgument<Config> chosen) {
  using namespace attention;
  const Shape& shape = params.shape;
  if constexpr (kHasScore) {
    scores_to_p_and_ds_of_step(s, dp, score_function, params, chosen, state.work, block, is_masked,
                               row_statistics<Scores>(lse, delta));
  } else if constexpr (Config::kHasDropout) {
    const uint32_t head = head_number(shape, state.work.batch_head, state.work.batch_head.head);
    dropout_score_gradients(s, dp, dropout, head, block.start, state.work.first, is_masked,
                            state.softmax_scale_log2, row_statistics<Scores>(lse, delta));
  }
}

// Return whether dk and dv are the sums over all queries, to which several thread blocks may contribute parts.
CUFLASH_DEVICE bool add_parts_of_block(const attention::Params&, attention::NoChosenLists, const attention::WorkTile&,
                                       WarpDk&, WarpDv&, int&) {
  return true;
}
CUFLASH_DEVICE bool add_parts_of_block(const attention::Params& params, const attention::ChosenLists& chosen,
                                       const attention::WorkTile& work, WarpDk& dk, WarpDv& dv, int& is_last) {
  const attention::Column column(params, chosen, work, kBlockKv);
  const attention::SumThreads threads{kThreads, static_cast<int>(threadIdx.x)};
  return attention::add_parts<kBlockKv>(params, chosen, work, column, dk, dv, is_last, threads,
                                        [] { __syncthreads(); });
}

// Write dK and dV of the tile, through the shared memory of its K and V. Called by all threads.
CUFLASH_DEVICE void write_gradients(const attention::Params& params, attention::ChosenArgument<Config> chosen,
                                    const BlockState& state, WarpDk& dk, WarpDv& dv,
                                    attention::DropoutArgument<Config> dropout) {
  using namespace attention;
  int& is_last = *reinterpret_cast<int*>(ptx::dynamic_shared<unsigned char>() + p_smem.start);
  if (!add_parts_of_block(params, chosen, state.work, dk, dv, is_last)) return;
  const Shape& shape = params.shape;
  const int kv_head = divmod(state.work.batch_head.head, shape.group_size).quotient;
  dk.scale(shape.softmax_scale);
  if constexpr (Config::kHasDropout) dv.scale(dropout.factor);
  stage_gradient(params.dk, state.work, kv_head, shape.head_dim, k_smem, dk);
  stage_gradient(params.dv, state.work, kv_head, shape.value_dim, v_smem, dv);
  __syncthreads();  // all of dK and dV is stored
  write_staged_gradient(params.dk, state.work, kv_head, shape.head_dim, k_smem);
  write_staged_gradient(params.dv, state.work, kv_head, shape.value_dim, v_smem);
}

constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(BlockState));

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_backward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  auto& state = *reinterpret_cast<BlockState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  if (!begin_tile(params, chosen, state)) return;
  WarpDk dk;
  WarpDv dv;
  dk.fill(0);
  dv.fill(0);
  for (int head = 0; head < shape.group_size; head += heads_per_tile(chosen)) {
    if (head > 0) begin_next_head(params, chosen, state);
    __syncthreads();  // the state is stored
    if (head > 0 && params.work.interval_head_stride != 0) load_k(params, state.work);  // the mask depends on the head
    auto blocks = queries_of_keys<kBlockQ, Listed>(params, chosen, state.visit_range);
    KvBlock block, next_block;
    bool has_block = blocks.next(block);
    load_block(params, chosen, state, has_block, block, 0);
    ptx::cp_async_commit();
    // The block after the next one is looked up now, so that loads from a list arrive while the current block is
    // multiplied.
    bool has_next_block = blocks.next(next_block);
    for (int stage = 0; has_block; stage = kNumStages - 1 - stage) {
      const QTile q_smem{kQOffset + stage * QTile::kBytes};
      const OTile do_smem{kDoOffset + stage * OTile::kBytes};
      const int num_rows = rows_of_step(chosen, block);
      const auto lse = statistics(stage, 0, num_rows), delta = statistics(stage, 1, num_rows);
      ptx::cp_async_wait<0>();
      __syncthreads();  // Q and dO have arrived, and K and V before the first step; all threads have read P and dS
      if (kNumStages == 2) load_block(params, chosen, state, has_next_block, next_block, 1 - stage);
      ptx::cp_async_commit();

      Scores s, dp;
      tile::gemm_nt(s, q_smem, k_smem);
      if (!kMakesPAndDsTogether && block.kind == BlockKind::kFull && state.work.last - state.work.first == kBlockKv) {
        make_scores_of_full_step(dv, s, dp, do_smem, lse, delta, state);
      } else {
        const bool is_masked =
            !kMakesPAndDsTogether || block.kind != BlockKind::kFull || state.work.last - state.work.first != kBlockKv;
        if (is_masked)
          mask_step_of_keys<Config::kIsListed>(s, params, chosen, state.work, block, masked_score());
        if (is_masked || kHasScore) clear_empty_rows(do_smem, lse);
        tile::gemm_nt(dp, do_smem, v_smem);
        KeptWeights<Scores> kept;
        if constexpr (kHasScore && Config::kHasDropout) {
          kept = kept_weights_of_queries(s, dropout, shape, {state.work.batch_head, block.start, block.stop},
                                         {state.work.first, state.work.last, block.kind, block.entry});
          drop_gradients(dp, kept, static_cast<float>(dropout.factor));
        }
        if constexpr (kMakesPAndDsTogether)
          make_changed_p_and_ds(s, dp, params, state, block, is_masked, lse, delta, score_function, dropout,
                                chosen);
        else
          score_gradients<true>(s, dp, state.softmax_scale_log2, row_statistics<Scores>(lse, delta));
        if constexpr (kHasScore && Config::kHasDropout) drop_weights(s, kept);
        if (kStoresScoresEarly) store_scores(s, dp);
        if (kOverlapsDs) {
          __syncthreads();  // all of P is stored
          tile::gemm_add_tn(dv, p_smem, do_smem);
        }
      }
      if (!kStoresScoresEarly) store_scores(s, dp);
      __syncthreads();  // all of P and dS is stored
      if (!kOverlapsDs) tile::gemm_add_tn(dv, p_smem, do_smem);
      if (Config::kDqAtomicWidth > 0) add_dq(params, chosen, state, block);
      tile::gemm_add_tn(dk, ds_smem, q_smem);
      if (kNumStages == 1) {
        __syncthreads();  // all warps have read Q and dO
        load_block(params, chosen, state, has_next_block, next_block, 0);
        ptx::cp_async_commit();
      }
      block = next_block;
      has_block = has_next_block;
      has_next_block = blocks.next(next_block);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // K and V have arrived, even without a step, and all threads have read them
  write_gradients(params, chosen, state, dk, dv, dropout);
}
