// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper, up to 128 columns. A thread block keeps a
// tile of keys and visits the blocks of queries that attend to them, over the query heads that share its key/value
// head; then it takes the next tile. One warpgroup loads Q, dO and the statistics of the queries. Two warpgroups
// multiply, for 64 keys each. They compute S and dP transposed, so that P and dS, and dK and dV, stay in registers.
// Only dS passes through shared memory, for the product dQ, whose parts are summed in global memory. If
// sm90/backward_rows.cu computes dQ, this kernel does not, and only one warpgroup multiplies. If queries choose their
// blocks, this kernel visits the queries that chose the tile's keys (packs_queries).
#include <sm90/backward_epilogue.cuh>

namespace cuflash::sm90 {

struct Backward : BackwardEpilogue<Config> {
  // Start the product for the scores of a step; the second function starts the product for dP. Both results are
  // transposed: rows are the warpgroup's keys.
  static CUFLASH_DEVICE void start_scores(Scores& s, const PipelineState& state, int part) {
    tile::start_gemm_nt(s, tile::KMajor<SmemK>(k_smem, 64 * part), tile::KMajor<SmemQ>(q_smem(state.stage)));
  }
  static CUFLASH_DEVICE void start_dp(Scores& dp, const PipelineState& state, int part) {
    tile::start_gemm_nt(dp, tile::KMajor<SmemV>(v_smem, 64 * part), tile::KMajor<SmemDo>(do_smem(state.stage)));
  }

  using Step = StepScoreOf<score::Function>;
  using SumsOfSteps = Step::StepSums;

  // Finish or stage dQ of a step. After the last step of a tile, also write dK and dV of the tile, and start the next
  // tile. `flags` are those of the next step. Return false if no tile is left.
  static CUFLASH_DEVICE bool end_step(const attention::Params& params, WarpDk& dk, WarpDv& dv, WarpDq& dq,
                                      float* dq_staging, const PipelineState& state, int flags, DqFinish dq_finish,
                                      int part, const score::Function& score, DropoutArgument dropout,
                                      ChosenArgument chosen, SumsOfSteps& of_steps) {
    SharedStorage& smem = shared();
    if constexpr (Config::kLastFinishesDq) {
      wait_dq(part);
      dq_finish = smem.dq_finish;
    }
    const bool finishes = dq_finish != DqFinish::kNot;
    // one branch for both cases, so that all other steps share the same code
    if (starts_next_tile(flags) || finishes) {
      if (starts_next_tile(flags)) release_kv();
      tile::wait_wgmma<0>(dk);
      if constexpr (kMakesDq && !Config::kLastFinishesDq) wait_dq(part);
      if (finishes)
        finish_dq(params, dq, dq_staging, smem.messages[state.stage], part, dq_finish == DqFinish::kWithSums);
      else if constexpr (kMakesDq) stage_dq(dq, dq_staging, part);
      if (starts_next_tile(flags)) {
        write_gradients(params, smem.messages[state.stage].work, dk, dv, dropout, chosen);
        if (flags & StepMessage::kEndOfWork) {
          finish_sums(score, of_steps);
          return false;
        }
        if constexpr (Config::kAddsDqInOrder) {  // the next tile varies from call to call
          finish_sums(score, of_steps);
          of_steps = {};
        }
        release_ds(part);
        dk.fill(0);
        dv.fill(0);
        wait_kv(flags);
      } else {
        release_ds(part);
      }
    } else {
      release_ds(part);
      if constexpr (kMakesDq && !Config::kLastFinishesDq) wait_dq(part);
      if constexpr (kMakesDq) stage_dq(dq, dq_staging, part);
    }
    return true;
  }

  // Compute P and dS of a step whose weights a score function or dropout changes, as operands of products, and store dS
  // in shared memory. If dP is not computed ahead of its step, it is computed here.
  static CUFLASH_DEVICE void make_changed_step(Scores& s, Scores& dp, PackedScores& p, PackedScores& ds, Kept& kept,
                                               const StepQueries& queries, const PipelineState& state, int part,
                                               const attention::Shape& shape, const score::Function& score,
                                               DropoutArgument dropout, float softmax_scale_log2, int ds_address,
                                               SumsOfSteps& of_steps) {
    const StepPositions positions = positions_of_step(state.stage);
    if constexpr (!kDpRunsAhead) {
      start_dp(dp, state, part);
      draw_step(kept, positions, dropout, shape);
      tile::wait_wgmma<0>(dp);
      ptx::fence_registers(tile::accumulators(s));
    }
    wait_ds(part);
    const auto make_operands = [&](auto is_plain) {
      make_changed_operands<decltype(is_plain)::kValue>(s, dp, p, ds, kept, queries, positions, score, dropout,
                                                        softmax_scale_log2, ds_address, of_steps);
    };
    if (queries.is_plain()) make_operands(IsPlain<true>());
    else make_operands(IsPlain<false>());
  }

  // Replace the scores of a step by P while the tensor cores compute dP, if P does not depend on dP.
  static CUFLASH_DEVICE void make_step_p(Scores& s, const Step& step, QueryValues& delta, const QueryValues& lse_2,
                                         const PipelineState& state, int first_query, int flags,
                                         float softmax_scale_log2) {
    const StepQueries queries{shared().queries[state.stage], first_query, flags};
    if constexpr (kMakesPEarly) make_changed_p(s, step, lse_2, queries, softmax_scale_log2);
    else if constexpr (kChangesWeights) return;
    else if (queries.is_plain()) make_p<true>(s, lse_2, delta, queries, softmax_scale_log2);
    else make_p<false>(s, lse_2, delta, queries, softmax_scale_log2);
  }

  // Return how the tile finishes dQ of a step, if the order of tiles determines it.
  static CUFLASH_DEVICE DqFinish finish_of_step(int flags) {
    return Config::kFinishesDqInOrder && flags & StepMessage::kFinalizesDq ? DqFinish::kWithSums : DqFinish::kNot;
  }

  // Return where a thread stores dS, if this kernel computes dQ.
  static CUFLASH_DEVICE int address_of_ds() {
    if constexpr (kMakesDq)  // opaque, so that the compiler does not recompute it in each step
      return ptx::opaque(tile::transposed_address(ds_smem, Scores::warp_row()));
    else return 0;
  }

  // Run a consumer warpgroup: process all steps, tile after tile. Each accumulator is a new variable in every
  // iteration, so that ptxas sees no wgmma registers carried over the loop. No wgmma may be in flight at the back edge
  // of the loop; otherwise ptxas serializes them (advisory C7510). There is one loop, with one step per iteration, so
  // that addresses of operands are uniform in the warp. In this version, dP of the next step is started before this
  // step ends, and P of the next step is computed meanwhile.
  static CUFLASH_DEVICE void consume_with_next_dp(const attention::Params& params, int part,
                                                  const score::Function& score, DropoutArgument dropout,
                                                  ChosenArgument chosen) {
    SharedStorage& smem = shared();
    PipelineState state;
    int flags = wait_step(state);
    if (flags & StepMessage::kEndOfWork) return;
    const int first_query = Scores::first_column();
    float* const dq_staging =
        reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kDqOffset) + DqSumLayout::thread_offset();
    const float softmax_scale_log2 = smem.softmax_scale_log2;
    const int ds_address = address_of_ds();
    Kept kept;
    SumsOfSteps of_steps;
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
    const QueryValues lse_2(smem.queries[state.stage].stats.lse_2 + first_query);
    start_dp(dp, state, part);
    const StepPositions positions = positions_of_step(state.stage);
    const Step step(score, positions);
    draw_step(kept, positions, dropout, params.shape);
    tile::wait_wgmma<1>(s);
    make_step_p(s, step, delta, lse_2, state, first_query, flags, softmax_scale_log2);
    tile::wait_wgmma<0>(dp);
    while (true) {
      const StepQueries queries{smem.queries[state.stage], first_query, flags};
      PackedScores p, ds;
      if constexpr (kChangesWeights) {
        make_changed_step(s, dp, p, ds, kept, queries, state, part, params.shape, score, dropout, softmax_scale_log2,
                          ds_address, of_steps);
      } else {
        wait_ds(part);
        if (queries.is_plain()) make_operands<true>(s, dp, p, ds, delta, queries, ds_address);
        else make_operands<false>(s, dp, p, ds, delta, queries, ds_address);
      }
      tile::start_gemm_add_nn(dv, p, tile::MnMajor<SmemDo>(do_smem(state.stage)));
      WarpDq dq;
      if constexpr (kMakesDq) start_dq(dq, part);
      tile::start_gemm_add_nn(dk, ds, tile::MnMajor<SmemQ>(q_smem(state.stage)));
      if constexpr (score::Function::kStoresGradient) store_gradient(score, positions_of_step(state.stage), ds_smem);
      const PipelineState next_state = state.next();
      const DqFinish dq_finish = finish_of_step(flags);
      QueryValues next_lse_2;
      flags = wait_step(next_state);
      // loaded before stores of dQ and the next product keep shared memory busy
      next_lse_2 = QueryValues(smem.queries[next_state.stage].stats.lse_2 + first_query);
      tile::wait_wgmma<1>(dv);
      tile::fence_registers(p);
      if constexpr (kMakesDq) ptx::fence_registers(tile::accumulators(dq));
      if constexpr (kReleasesDo) tile::arrive(smem.d_o[state.stage].empty);
      wait_next_head_k(flags);
      if (!end_step(params, dk, dv, dq, dq_staging, state, flags, dq_finish, part, score, dropout, chosen, of_steps))
        return;
      Scores next_s;
      start_scores(next_s, next_state, part);
      // this wait contains a branch; without one, ptxas serializes the products
      tile::wait_full(smem.d_o[next_state.stage], next_state.phase);
      tile::wait_wgmma<1>(dk);
      tile::fence_registers(ds);
      Scores next_dp;
      tile::arrive(smem.q[state.stage].empty);
      start_dp(next_dp, next_state, part);
      const StepPositions next_positions = positions_of_step(next_state.stage);
      const Step next_step(score, next_positions);  // computed while products run, like the random numbers of dropout
      draw_step(kept, next_positions, dropout, params.shape);
      tile::wait_wgmma<1>(next_s);
      make_step_p(next_s, next_step, delta, next_lse_2, next_state, first_query, flags, softmax_scale_log2);
      tile::wait_wgmma<0>(next_dp);
      dp = next_dp;
      s = next_s;
      state = next_state;
    }
  }
  // Run a consumer warpgroup as above, if registers cannot hold dP of the next step.
  static CUFLASH_DEVICE void consume_without_next_dp(const attention::Params& params, int part,
                                                     const score::Function& score, DropoutArgument dropout,
                                                     ChosenArgument chosen) {
    SharedStorage& smem = shared();
    PipelineState state;
    int flags = wait_step(state);
    if (flags & StepMessage::kEndOfWork) return;
    const int first_query = Scores::first_column();
    float* const dq_staging =
        reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kDqOffset) + DqSumLayout::thread_offset();
    const float softmax_scale_log2 = smem.softmax_scale_log2;
    const int ds_address = address_of_ds();
    Kept kept;
    SumsOfSteps of_steps;
    wait_kv(flags);
    WarpDk dk;
    WarpDv dv;
    dk.fill(0);
    dv.fill(0);
    Scores s, dp;
    start_scores(s, state, part);
    release_ds(part);
    tile::wait_full(smem.d_o[state.stage], state.phase);
    tile::wait_wgmma<0>(s);
    while (true) {
      const StepQueries queries{smem.queries[state.stage], first_query, flags};
      PackedScores p, ds;
      if constexpr (kChangesWeights) {
        make_changed_step(s, dp, p, ds, kept, queries, state, part, params.shape, score, dropout, softmax_scale_log2,
                          ds_address, of_steps);
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
      if constexpr (score::Function::kStoresGradient) store_gradient(score, positions_of_step(state.stage), ds_smem);
      const PipelineState next_state = state.next();
      const DqFinish dq_finish = finish_of_step(flags);
      tile::wait_wgmma<1>(dv);
      tile::fence_registers(p);
      if constexpr (kMakesDq) ptx::fence_registers(tile::accumulators(dq));
      if constexpr (kReleasesDo) tile::arrive(smem.d_o[state.stage].empty);
      flags = wait_step(next_state);
      wait_next_head_k(flags);
      if (!end_step(params, dk, dv, dq, dq_staging, state, flags, dq_finish, part, score, dropout, chosen, of_steps))
        return;
      Scores next_s;
      start_scores(next_s, next_state, part);
      // this wait contains a branch; without one, ptxas serializes the products
      tile::wait_full(smem.d_o[next_state.stage], next_state.phase);
      tile::wait_wgmma<0>(next_s);
      ptx::fence_registers(tile::accumulators(dk));
      tile::fence_registers(ds);
      tile::arrive(smem.q[state.stage].empty);
      s = next_s;
      state = next_state;
    }
  }

  static CUFLASH_DEVICE void consume(const attention::Params& params, int part, const score::Function& score,
                                     DropoutArgument dropout, ChosenArgument chosen) {
    if constexpr (kDpRunsAhead) consume_with_next_dp(params, part, score, dropout, chosen);
    else consume_without_next_dp(params, part, score, dropout, chosen);
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps,
                                 const QueryState& query_state, DropoutArgument dropout,
                                 const score::Function& score_function, StagedMapArgument staged_map,
                                 ChosenArgument chosen) {
    const auto consume_part = [&](int part) { consume(params, part, score_function, dropout, chosen); };
    run_roles(params, maps, query_state, consume_part, score_function, staged_map, chosen);
  }
};

constexpr int kSharedBytes = Backward::kSharedBytes;

}  // namespace cuflash::sm90

namespace cuflash {

// Return the bins to which the text of the score function adds.
CUFLASH_DEVICE score::Function::Number* bins_of_warp() { return sm90::Backward::bins_of_warp(); }

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::sm90::Backward::kThreads, cuflash::Config::kMinBlocks)
sm90_backward(const __grid_constant__ cuflash::attention::Params params,
              const __grid_constant__ cuflash::sm90::TensorMaps maps,
              const __grid_constant__ cuflash::sm90::QueryState query_state CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  Backward::run(params, maps, query_state, dropout, score_function, staged_map, chosen);
}
