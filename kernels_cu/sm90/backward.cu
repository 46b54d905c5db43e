// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper: a block keeps a tile of keys and walks the
// queries that visit it, over the query heads that share it, tile after tile. One warpgroup brings Q, dO and what is known
// of each query; two multiply, 64 keys each. They make S and dP transposed: so P and dS, and dK and dV, stay in registers,
// and only dS goes through shared memory, for dQ, whose parts are added up in global memory. Where sm90/backward_rows.cu
// makes dQ, nothing does, and one warpgroup multiplies.
#include <sm90/changed_weights.cuh>

namespace cuflash {

static_assert(!kIsWide && kBlockKv == 64 * kNumConsumers, "a warpgroup has 64 keys");

// Rows are keys.
using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kNumConsumers>;
using WarpDk = tile::WarpTile<1, kHeadDim / 8, 4 * kNumConsumers>;
using WarpDv = tile::WarpTile<1, kValueDim / 8, 4 * kNumConsumers>;
using PackedScores = tile::PackedOperand<Element, Scores>;  // P or dS
using SmemDs = tile::WgmmaTile<Element, kBlockQ, kBlockKv>;
constexpr SmemDs ds_smem{kScoreOffset};  // if dQ is made

// What a warpgroup makes of dQ: of 64 queries all columns, or of all queries 64 columns at most.
constexpr int kRowParts = kBlockQ / 64;
// Of 64 queries registers have room for the scores and dP of the step after too: P is made while dP is.
constexpr bool kDpRunsAhead = kRowParts == 1;
using KOfWarpgroup = tile::WgmmaTile<Element, kBlockKv, kHeadDim * kRowParts / kNumConsumers>;

// A step's queries as a thread asks about them, from its first one on.
struct StepQueries {
  const StageQueries& stage;
  int first_query, flags;

  CUFLASH_DEVICE bool is_plain() const { return !(flags & (StepMessage::kMasked | StepMessage::kLargeLse)); }
  CUFLASH_DEVICE const float* lse_2() const { return stage.stats.lse_2 + first_query; }
  CUFLASH_DEVICE const float* delta() const { return stage.stats.delta + first_query; }
};

// Which elements of scores count: all, or, of a masked step, bits of the thread's keys, a word each 32 queries.
template <bool IsPlain>
struct ThreadMask {
  explicit CUFLASH_DEVICE ThreadMask(const StepQueries&) {}
  CUFLASH_DEVICE bool at(int, int) const { return true; }
};
template <>
struct ThreadMask<false> {
  uint32_t bits[Scores::kRows][kQueryWords];  // of the thread's first query on

  ThreadMask() = default;
  explicit CUFLASH_DEVICE ThreadMask(const StepQueries& queries) {
    const uint32_t all = queries.flags & StepMessage::kMasked ? 0 : ~0u;  // where an lse is large, but nothing hidden
    const uint32_t(*const row_masks)[kQueryWords] = &queries.stage.row_masks[Scores::first_row()];
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
      for (int x = 0; x < kQueryWords; ++x) bits[i][x] = (row_masks[Scores::row(i)][x] | all) >> queries.first_query;
  }
  CUFLASH_DEVICE bool at(int i, int j) const {
    return bits[i][Scores::column(j) / 32] >> Scores::column(j) % 32 & 1;
  }
};

// What is known of the thread's queries: of as many as registers are free for at once, so that products which start
// meanwhile do not hold it up.
struct QueryValues {
  static constexpr int kPrefetched = 1024 / kBlockQ;
  static_assert(kPrefetched <= Scores::kColumns, "some, or all");
  const float* from;
  float first[kPrefetched];

  QueryValues() = default;
  explicit CUFLASH_DEVICE QueryValues(const float* from) : from(from) {
#pragma unroll
    for (int j = 0; j < kPrefetched; ++j) first[j] = from[Scores::column(j)];
  }
  CUFLASH_DEVICE float at(int j) const { return j < kPrefetched ? first[j % kPrefetched] : from[Scores::column(j)]; }
};

// P in the place of q k^T, as attention::probability has it, or without its minimum. delta is asked for once lse is spent,
// and comes under the exponentials.
template <bool IsPlain>
CUFLASH_DEVICE void make_p(Scores& s, const QueryValues& lse_2, QueryValues& delta, const StepQueries& queries,
                           float softmax_scale_log2) {
  const ThreadMask<IsPlain> mask(queries);
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) s.at(i, j) = ptx::fma(s.at(i, j), softmax_scale_log2, -lse_2.at(j));
  ptx::compiler_barrier();
  delta = QueryValues(queries.delta());
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float p = ptx::exp2_approx(s.at(i, j));
      s.at(i, j) = IsPlain ? p : mask.at(i, j) ? ptx::min_or_nan(p, 1) : 0.0f;
    }
}

// dS = P (dP - delta) in the place of dP, for 16 queries.
template <bool IsPlain>
CUFLASH_DEVICE void make_ds(Scores& p, Scores& dp, const QueryValues& delta, const ThreadMask<IsPlain>& mask, int k) {
#pragma unroll
  for (int j = 4 * k; j < 4 * (k + 1); ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      dp.at(i, j) = mask.at(i, j) ? p.at(i, j) * (dp.at(i, j) - delta.at(j)) : 0.0f;
}

// The same for all; and P and dS as left operands, and dS, transposed, where dQ's product reads it.
template <bool IsPlain>
CUFLASH_DEVICE void make_operands(Scores& s, Scores& dp, PackedScores& p, PackedScores& ds, const QueryValues& delta,
                                  const StepQueries& queries, uint32_t ds_address) {
  const ThreadMask<IsPlain> mask(queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k) {
    make_ds(s, dp, delta, mask, k);
    p.pack(s, k);
    ds.pack(dp, k);
    if constexpr (kMakesDq) tile::store_transposed<SmemDs>(ds_address, ds, k);
  }
}

// P, of no more than 1, or dS of a step that is not plain, where all of it was made: 0 where it is hidden.
template <bool IsP>
CUFLASH_DEVICE void clamp_and_mask(Scores& x, const StepQueries& queries) {
  const ThreadMask<false> mask(queries);
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      x.at(i, j) = !mask.at(i, j) ? 0.0f : IsP ? ptx::min_or_nan(x.at(i, j), 1) : x.at(i, j);
  ptx::fence_registers(tile::accumulators(x));
}

// P and dS, once dP is there, in their places: as of a plain step, and mended if it is none. Code that steps share is in one
// piece, which waits for no instructions.
CUFLASH_DEVICE void make_p_and_ds(Scores& s, Scores& dp, const QueryValues& lse_2, const StepQueries& queries,
                                  float softmax_scale_log2) {
  QueryValues delta;
  make_p<true>(s, lse_2, delta, queries, softmax_scale_log2);
  tile::wait_wgmma<0>(dp);
  ptx::fence_registers(tile::accumulators(s));
  if (!queries.is_plain()) clamp_and_mask<true>(s, queries);
  const ThreadMask<true> all(queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k) make_ds(s, dp, delta, all, k);
  ptx::fence_registers(tile::accumulators(dp));
  if (!queries.is_plain()) clamp_and_mask<false>(dp, queries);
}

// Where a score function or dropout changes weights.

using Kept = attention::KeptFragments<Scores, true>;

// P is made while dP is multiplied: where slopes do not need scores, and registers hold dP of the next step.
constexpr bool kMakesPEarly = kChangesWeights && !kMakesPairs && kDpRunsAhead;

// visit(i, j) of a thread's elements of 16 queries.
template <class Visit>
CUFLASH_DEVICE void for_each_of_fragment(int k, Visit visit) {
#pragma unroll
  for (int j = 4 * k; j < 4 * (k + 1); ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) visit(i, j);
}

// P in the place of q k^T for 16 queries: 0 where it is hidden, and of queries without a key. `scale` is that of products
// with a score function, else of exponents.
template <bool IsPlain, class Step>
CUFLASH_DEVICE void make_changed_p(Scores& s, const Step& step, int k, const StepQueries& queries,
                                   const ThreadMask<IsPlain>& mask, float scale) {
  step.apply(s, k, scale);
  const float exponent_scale = kHasScore ? static_cast<float>(attention::kLog2E) : scale;
  for_each_of_fragment(k, [&](int i, int j) {
    const float lse_2 = queries.lse_2()[Scores::column(j)];
    const float p = ptx::exp2_approx(ptx::fma(s.at(i, j), exponent_scale, -lse_2));
    const bool is_seen = mask.at(i, j) && lse_2 != -ptx::negative_infinity<float>();
    s.at(i, j) = IsPlain ? p : is_seen ? ptx::min_or_nan(p, 1) : 0.0f;
  });
}

// The same for all, as of a plain step, and mended if it is none: under products code is in one piece.
template <class Step>
CUFLASH_DEVICE void make_changed_p(Scores& s, const Step& step, const StepQueries& queries, float scale) {
  const ThreadMask<true> all(queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k) make_changed_p(s, step, k, queries, all, scale);
  if (queries.is_plain()) return;
  clamp_and_mask<true>(s, queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k)
    for_each_of_fragment(k, [&](int i, int j) {
      if (queries.lse_2()[Scores::column(j)] == -ptx::negative_infinity<float>()) s.at(i, j) = 0;
    });
}

// Which weights are kept.
CUFLASH_DEVICE void draw_step(Kept& kept, const StepPlace& place, attention::DropoutArgument dropout,
                              const attention::Shape& shape) {
  if constexpr (config::kHasDropout) kept = kept_weights_of_step<Scores>(dropout, shape, place);
}

// Which of two copies of a function, of plain steps and of others.
template <bool Value>
struct IsPlain {
  static constexpr bool kValue = Value;
};

// P and dS as left operands, of P, or q k^T, and dP; and dS, transposed, where dQ's product reads it. P is left as dV
// has it, without what is dropped.
template <bool IsPlain, class Score>
CUFLASH_DEVICE void make_changed_operands(Scores& s, Scores& dp, PackedScores& p, PackedScores& ds,
                                          const Kept& kept, const StepQueries& queries, const StepPlace& place,
                                          const Score& score, attention::DropoutArgument dropout, float scale,
                                          uint32_t ds_address) {
  using Step = StepScoreIf<Scores, Score>;
  const Step step(score, place);
  typename Step::Sums sums;
  const ThreadMask<IsPlain> mask(queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k) {
    if constexpr (config::kHasDropout)
      for_each_of_fragment(k, [&](int i, int j) { dp.at(i, j) = kept.at(i, j) ? dp.at(i, j) : 0.0f; });
    if constexpr (kMakesPairs) {
      if constexpr (config::kHasDropout)
        for_each_of_fragment(k, [&](int i, int j) { dp.at(i, j) *= dropout.single_factor; });
      step.make_pairs(
          s, dp, scale, [&](int i, int j) { return mask.at(i, j); },
          [&](int j) { return queries.lse_2()[Scores::column(j)]; },
          [&](int j) { return queries.delta()[Scores::column(j)]; }, k, sums);
    } else {
      if constexpr (!kMakesPEarly) make_changed_p(s, step, k, queries, mask, scale);
      for_each_of_fragment(k, [&](int i, int j) {
        const float delta = queries.delta()[Scores::column(j)];
        float difference;  // of the gradient by the weight and delta
        if constexpr (config::kHasDropout) difference = ptx::fma(dp.at(i, j), dropout.single_factor, -delta);
        else difference = dp.at(i, j) - delta;
        const float ds = s.at(i, j) * difference;
        // of a query that the score function hides from all keys too
        dp.at(i, j) = IsPlain || s.at(i, j) != 0 ? ds : 0.0f;
      });
      if constexpr (kHasSlopes) step.apply_slopes(s, dp, k, sums);
    }
    if constexpr (config::kHasDropout)
      for_each_of_fragment(k, [&](int i, int j) { s.at(i, j) = kept.at(i, j) ? s.at(i, j) : 0.0f; });
    p.pack(s, k);
    ds.pack(dp, k);
    if constexpr (kMakesDq) tile::store_transposed<SmemDs>(ds_address, ds, k);
  }
  step.flush(sums);
}

CUFLASH_DEVICE void start_scores(Scores& s, const PipelineState& state, int part) {
  tile::start_gemm_nt(s, tile::KMajor<SmemK>(k_smem, 64 * part),
                      tile::KMajor<SmemQ>(q_smem(state.stage)));
}

CUFLASH_DEVICE void start_dp(Scores& dp, const PipelineState& state, int part) {
  tile::start_gemm_nt(dp, tile::KMajor<SmemV>(v_smem, 64 * part),
                      tile::KMajor<SmemDo>(do_smem(state.stage)));
}

// What the keys add to dQ of a step, a part of it for each warpgroup. Called by both, each once it has stored dS of its keys.
CUFLASH_DEVICE void start_dq(WarpDq& dq, int part) {
  ptx::fence_proxy_async();
  ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);  // dS is there
  const KOfWarpgroup k_part{k_smem.start + (kRowParts == 1 ? part * KOfWarpgroup::kBytes : 0)};
  tile::start_gemm_nn(dq, tile::KMajor<SmemDs>(ds_smem, kRowParts == 1 ? 0 : 64 * part),
                      tile::MnMajor<KOfWarpgroup>(k_part));
}

// A warpgroup may write dS anew, once the other has left it.
CUFLASH_DEVICE void wait_ds(int part) {
  if constexpr (kMakesDq) ptx::bar_sync(kDsEmpty + part, kNumConsumers * kWarpgroupThreads);
}
CUFLASH_DEVICE void release_ds(int part) {
  if constexpr (kMakesDq) ptx::bar_arrive(kDsEmpty + (1 - part), kNumConsumers * kWarpgroupThreads);
}

// Have it added up, or finish it: in its room, once that is free, or has the sums of what other tiles of keys made.
CUFLASH_DEVICE void wait_dq(int part) { ptx::bar_sync(kDqEmpty + part, kWarpgroupThreads + 32); }
CUFLASH_DEVICE void stage_dq(const WarpDq& dq, float* staged, int part) {
  DqSumLayout::store_shared(staged, dq);
  ptx::bar_arrive(kDqFull + part, kWarpgroupThreads + 32);
}
// Of all queries of the tile, whichever the step goes on to. Four columns of 8 at a time, as registers are few.
CUFLASH_DEVICE void finish_dq(const attention::Params& params, WarpDq& dq, const float* staged,
                              const StepMessage& message, int part,
                              bool adds) {
  const attention::BatchHead& batch_head = shared().works[message.work].tile.batch_head;
  const auto all = attention::matrix<Element>(params.dq, batch_head, batch_head.head, params.shape.seqlen_q,
                                              params.shape.head_dim);
  const auto rows = all.rows(message.block.start,
                             attention::query_tile_end<Listed>(params, message.block.start, kBlockQ));
  const float scale = static_cast<float>(params.shape.softmax_scale);
#pragma unroll
  for (int first = 0; first < WarpDq::kColumnTiles; first += 4) {
    if (adds) DqSumLayout::add_shared(staged, dq, first, 4);
    tile::store_full_rows(rows, dq, first, scale);
  }
  ptx::bar_arrive(kDqFull + part, kWarpgroupThreads + 32);
}

// Of a tile, all of whose steps were walked.
CUFLASH_DEVICE void write_gradients(const attention::Params& params, const attention::WorkTile& work, WarpDk& dk,
                                    WarpDv& dv, attention::DropoutArgument dropout) {
  const int kv_head = work.batch_head.head / params.shape.group_size;
  dk.scale(params.shape.softmax_scale);
  if constexpr (config::kHasDropout) dv.scale(dropout.single_factor);
  write_gradient(params.dk, work, kv_head, params.shape.head_dim, dk);
  write_gradient(params.dv, work, kv_head, params.shape.value_dim, dv);
}

// Walk all steps, tile after tile. A product's registers are variables of their own where they live: what starts anew is no
// one's before. There is one loop, each time of one step, at whose end no product is under way: so the compiler knows that
// where operands lie is one number for the warp, and waits for none by itself.
CUFLASH_DEVICE void consume(const attention::Params& params, int part, const score::Function& score,
                            attention::DropoutArgument dropout) {
  using namespace attention;
  SharedStorage& smem = shared();
  PipelineState state;
  int flags = wait_step(state);
  if (flags & StepMessage::kEndOfWork) return;
  const int first_query = Scores::first_column();
  float* const dq_staging = reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kDqOffset) +
      DqSumLayout::thread_offset();
  const float softmax_scale_log2 = smem.softmax_scale_log2;
  int ds_address = 0;
  if constexpr (kMakesDq)  // opaque: else reckoned anew in each step
    ds_address = ptx::opaque(tile::transposed_address(ds_smem, Scores::warp_row()));
  Kept kept;
  using Step = StepScoreIf<Scores, score::Function>;
  const auto make_step_p = [&](Scores& s, QueryValues& delta, const QueryValues& lse_2, const PipelineState& state,
                               const Step& step) {
    const StepQueries queries{smem.queries[state.stage], first_query, flags};
    if constexpr (kMakesPEarly)
      make_changed_p(s, step, queries, softmax_scale_log2);
    else if constexpr (kChangesWeights) return;
    else if (queries.is_plain()) make_p<true>(s, lse_2, delta, queries, softmax_scale_log2);
    else make_p<false>(s, lse_2, delta, queries, softmax_scale_log2);
  };
  wait_kv(flags);
  WarpDk dk;
  WarpDv dv;
  dk.fill(0);
  dv.fill(0);
  Scores s, dp;
  QueryValues delta;
  start_scores(s, state, part);
  release_ds(part);
  tile::wait_full(smem.d_o[state.stage], state.phase);
  if constexpr (kDpRunsAhead) {
    const QueryValues lse_2(smem.queries[state.stage].stats.lse_2 + first_query);
    start_dp(dp, state, part);
    const StepPlace place = place_of_step(smem.messages[state.stage]);
    const Step step(score, place);
    draw_step(kept, place, dropout, params.shape);
    tile::wait_wgmma<1>(s);
    make_step_p(s, delta, lse_2, state, step);
    tile::wait_wgmma<0>(dp);
  } else {
    tile::wait_wgmma<0>(s);
  }
  while (true) {
    const StepQueries queries{smem.queries[state.stage], first_query, flags};
    PackedScores p, ds;
    if constexpr (kChangesWeights) {
      const StepPlace place = place_of_step(smem.messages[state.stage]);
      if constexpr (!kDpRunsAhead) {
        start_dp(dp, state, part);
        draw_step(kept, place, dropout, params.shape);
        tile::wait_wgmma<0>(dp);
        ptx::fence_registers(tile::accumulators(s));
      }
      wait_ds(part);
      const auto make_operands = [&](auto is_plain) {
        make_changed_operands<decltype(is_plain)::kValue>(s, dp, p, ds, kept, queries, place, score, dropout,
                                                          softmax_scale_log2, ds_address);
      };
      if (queries.is_plain()) make_operands(IsPlain<true>());
      else make_operands(IsPlain<false>());
    } else if constexpr (kDpRunsAhead) {
      wait_ds(part);
      if (queries.is_plain()) make_operands<true>(s, dp, p, ds, delta, queries, ds_address);
      else make_operands<false>(s, dp, p, ds, delta, queries, ds_address);
    } else {
      const QueryValues lse_2(queries.lse_2());
      start_dp(dp, state, part);
      make_p_and_ds(s, dp, lse_2, queries, softmax_scale_log2);
      p = s;
      ds = dp;
      wait_ds(part);
      tile::store_transposed<SmemDs>(ds_address, ds);
    }
    tile::start_gemm_add_nn(dv, p, tile::MnMajor<SmemDo>(do_smem(state.stage)));
    WarpDq dq;
    if constexpr (kMakesDq) start_dq(dq, part);
    tile::start_gemm_add_nn(dk, ds, tile::MnMajor<SmemQ>(q_smem(state.stage)));
    const PipelineState next_state = state.next();
    DqFinish dq_finish = kFinishesDqInOrder && flags & StepMessage::kFinalizesDq ? DqFinish::kWithSums : DqFinish::kNot;
    QueryValues next_lse_2;
    if constexpr (kDpRunsAhead) {  // asked before stores of dQ, and the next scores, ask shared memory for all it gives
      flags = wait_step(next_state);
      next_lse_2 = QueryValues(smem.queries[next_state.stage].stats.lse_2 + first_query);
    }
    tile::wait_wgmma<1>(dv);
    tile::fence_registers(p);
    if constexpr (kMakesDq) ptx::fence_registers(tile::accumulators(dq));
    if constexpr (kReleasesDo) tile::arrive(smem.d_o[state.stage].empty);
    if constexpr (!kDpRunsAhead) flags = wait_step(next_state);
    wait_next_head_k(flags);
    if constexpr (kLastArrivalFinishesDq) {
      wait_dq(part);
      dq_finish = smem.dq_finish;
    }
    const bool finishes = dq_finish != DqFinish::kNot;
    if (starts_next_tile(flags) || finishes) {  // one branch: steps that do neither run through one piece of code
      if (starts_next_tile(flags)) release_kv();
      tile::wait_wgmma<0>(dk);
      if constexpr (kMakesDq && !kLastArrivalFinishesDq) wait_dq(part);
      if (finishes) finish_dq(params, dq, dq_staging, smem.messages[state.stage], part,
                              dq_finish == DqFinish::kWithSums);
      else if constexpr (kMakesDq) stage_dq(dq, dq_staging, part);
      if (starts_next_tile(flags)) {
        write_gradients(params, smem.works[smem.messages[state.stage].work].tile, dk, dv, dropout);
        if (flags & StepMessage::kEndOfWork) return;
        release_ds(part);
        dk.fill(0);
        dv.fill(0);
        wait_kv(flags);
      } else {
        release_ds(part);
      }
    } else {
      release_ds(part);
      if constexpr (kMakesDq && !kLastArrivalFinishesDq) wait_dq(part);
      if constexpr (kMakesDq) stage_dq(dq, dq_staging, part);
    }
    Scores next_s;
    start_scores(next_s, next_state, part);
    // a branch: without one the compiler serializes products
    tile::wait_full(smem.d_o[next_state.stage], next_state.phase);
    if constexpr (kDpRunsAhead) {
      tile::wait_wgmma<1>(dk);
      tile::fence_registers(ds);
      Scores next_dp;
      tile::arrive(smem.q[state.stage].empty);
      start_dp(next_dp, next_state, part);
      const StepPlace next_place = place_of_step(smem.messages[next_state.stage]);
      const Step next_step(score, next_place);  // found, as is what is drawn, while products run
      draw_step(kept, next_place, dropout, params.shape);
      tile::wait_wgmma<1>(next_s);
      make_step_p(next_s, delta, next_lse_2, next_state, next_step);
      tile::wait_wgmma<0>(next_dp);
      dp = next_dp;
    } else {
      tile::wait_wgmma<0>(next_s);
      ptx::fence_registers(tile::accumulators(dk));
      tile::fence_registers(ds);
      tile::arrive(smem.q[state.stage].empty);
    }
    s = next_s;
    state = next_state;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_backward(const __grid_constant__ cuflash::attention::Params params,
              const __grid_constant__ cuflash::attention::TensorMaps maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  run_roles(params, maps, [&](int part) { consume(params, part, score_function, dropout); });
}
