// FlashAttention-3's forward pass (arXiv 2407.08608, algorithm 2) on Hopper. One warpgroup of a thread block loads
// tiles of Q, K and V into shared memory; the other warpgroups multiply them, 64 rows of queries each. The scores of
// the next step are multiplied while the scores of this step become weights, and while the weights of the previous step
// are multiplied by V. Warpgroups start products alternately, so that the softmax of one overlaps the products of
// another. Blocks take further tiles until none is left.
#include <attention/dropout.cuh>
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <sm90/drawn_weights.cuh>
#include <sm90/forward_epilogue.cuh>
#include <sm90/forward_hooks.cuh>
#include <sm90/forward_tiles.cuh>
#include <sm90/kv_pipeline.cuh>
#include <sm90/tile_score.cuh>

namespace cuflash::sm90 {

struct Forward : DrawnWeights<Config> {
  // Consumers test the barriers of the next slots while they compute weights; at 64 columns this costs more than it
  // saves.
  static constexpr bool kTestsBarriersEarly = kHeadDim > 64;
  // The masked steps of a tile and its last step skip the maximum too. They then release K later, which would delay
  // kernels with two warpgroups, because each warpgroup then needs more keys in the same time.
  static constexpr bool kSkipsMaxOnMasked = kNumConsumers == 3;
  // A score function keeps its values in the consumers' registers, unless it reads arrays at positions.
  static constexpr bool kKeepsScoreInRegisters = kHasScore && !score::Function::kReadsAtPositions;

  // Numbers of registers per thread of each role.
  static constexpr int kProducerRegisters =
      kNumConsumers == 4                                                                ? 24
      : kNumConsumers == 3 || kHasDrawers                                               ? 32
      : kMinBlocks == 3 || (kValueDim > 128 && kBlockKv > 64) || kKeepsScoreInRegisters ? 40
                                                                                        : 56;
  static constexpr int kDrawerRegisters = 72;
  static constexpr int kConsumerRegisters = kNumConsumers == 4   ? 112
                                            : kNumConsumers == 3 ? 160
                                            : kNumConsumers == 2
                                                ? (504 - kProducerRegisters - kHasDrawers * kDrawerRegisters) / 2
                                            : kMinBlocks == 3 ? 120
                                                              : 200;
  static_assert(kThreads == kWarpgroupThreads * (1 + kNumConsumers + kHasDrawers), "a warpgroup has 64 rows");

  using PackedP = tile::PackedOperand<Element, Scores>;
  using ScoresOfTile = TileScoreIf<Config, Scores>;
  using Kept = attention::KeptFragments<Scores>;
  using VOperand = tile::MnMajor<SmemV>;

  // Multiply the scores of a tile's first step, wait for them, and return the flags of the step.
  static CUFLASH_DEVICE int start_first_scores(Scores& s, int group, unsigned num_tiles_done, unsigned num_k_blocks,
                                               bool waits_for_ping_pong) {
    tile::wait_full(shared().k[stage_of(num_k_blocks)], phase_of(num_k_blocks));
    const int flags = flags_of_warpgroup(group, num_k_blocks);
    if (waits_for_ping_pong) ping_pong_wait();
    tile::start_gemm_nt(s, q_operand(group, num_tiles_done), KOperand(k_smem(stage_of(num_k_blocks))));
    if (waits_for_ping_pong) ping_pong_signal();
    tile::wait_wgmma<0>(s);
    return flags;
  }

  // Skip the rest of a tile, whose keys the warpgroup's queries do not see: take part in the ping-pong, and release K
  // and V, except the last V if `keeps_last_v`.
  static CUFLASH_DEVICE void skip_blocks(int group, unsigned& num_k_blocks, bool keeps_last_v) {
    for (bool is_end = false; !is_end; ++num_k_blocks) {
      const int stage = stage_of(num_k_blocks), phase = phase_of(num_k_blocks);
      tile::wait_full(shared().k[stage], phase);
      is_end = flags_of_warpgroup(group, num_k_blocks) & StepMessage::kLastOfTile;
      tile::arrive(shared().k[stage].empty);
      if constexpr (kStagesArray) {
        tile::wait_full(array_slot(stage, group % kNumConsumers), phase);
        tile::arrive(array_slot(stage, group % kNumConsumers).empty);
      }
      if constexpr (kHasDrawers) skip_kept(num_k_blocks);
      ping_pong_wait();
      ping_pong_signal();
      tile::wait_full(shared().v[stage], phase);
      if (!is_end || !keeps_last_v) tile::arrive(shared().v[stage].empty);
    }
  }

  // Return the index of this thread's warpgroup among the consumers.
  static CUFLASH_DEVICE int consumer_number() { return Scores::warp_row() / 64; }

  // Replace the scores of a step by the score function's results, before masks are applied.
  static CUFLASH_DEVICE void score_step(const ScoresOfTile& of_tile, const score::Function& function, Scores& s,
                                        unsigned num_k_blocks) {
    const int stage = stage_of(num_k_blocks);
    if constexpr (kStagesArray) tile::wait_full(array_slot(stage, consumer_number()), phase_of(num_k_blocks));
    if constexpr (kHasScore)
      of_tile.apply(s, function, shared().softmax_scale, shared().messages[stage].block,
                    array_smem(stage, consumer_number()));
  }

  // Compute the values of the score function that all steps of a tile share.
  static CUFLASH_DEVICE void prepare_tile_score(ScoresOfTile& of_tile, const score::Function& function,
                                                unsigned num_tiles_done, PagesArgument pages) {
    if constexpr (kHasScore)
      of_tile.prepare(function, shared().tile_infos[tile_info_index(num_tiles_done)].work, shared().softmax_scale,
                      pages);
  }

  // Determine which weights of a step dropout keeps. Called while its scores are multiplied.
  static CUFLASH_DEVICE void draw_step(const attention::Params& params, DropoutArgument dropout, Kept& kept,
                                       unsigned num_tiles_done, unsigned num_k_blocks) {
    if constexpr (kHasDrawers) {
      read_kept(kept, num_k_blocks);
    } else if constexpr (Config::kHasDropout) {
      const attention::WorkTile& work = shared().tile_infos[tile_info_index(num_tiles_done)].work;
      kept =
          attention::kept_fragments<false>(Scores(), attention::Draws(dropout),
                                           attention::head_number(params.shape, work.batch_head, work.batch_head.head),
                                           work.first, shared().messages[stage_of(num_k_blocks)].block.start);
    }
  }

  // Pack the weights of a step as an operand; dropped weights are 0.
  static CUFLASH_DEVICE void pack_step(PackedP& p, const Scores& s, const Kept& kept) {
    p = s;
    if constexpr (Config::kHasDropout)
#pragma unroll
      for (int k = 0; k < PackedP::kNumFragments; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) p.fragments[k][e] &= kept.halves_at(e % 2, 4 * k + e / 2 * 2);
  }

  // Multiply the scores of a step again, by mma.sync, for one warp whose scores have been overwritten.
  static CUFLASH_DEVICE void recompute_scores(const ScoresOfTile& of_tile, const score::Function& function, Scores& s,
                                              unsigned num_tiles_done, unsigned num_k_blocks) {
    constexpr int kInPanel = SmemQ::kPanelWidth / 16;
    s.fill(0);
#pragma unroll 1  // executed rarely, so the code is kept short
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const auto q = tile::left_k_major(q_smem(q_stage_of(num_tiles_done)).panel(k / kInPanel), s.warp_row());
      const auto keys = tile::right_k_major(k_smem(stage_of(num_k_blocks)).panel(k / kInPanel), 0);
      uint32_t q_frag[1][4];
      tile::load(q_frag[0], q, 0, k % kInPanel);
      tile::mma_k_step<Element>(s, q_frag, keys, k % kInPanel, false);
    }
    score_step(of_tile, function, s, num_k_blocks);
  }

  // Release K of a step. In the last step of a tile, also release Q, if Q has one stage.
  static CUFLASH_DEVICE void release_k(unsigned num_k_blocks, bool is_last) {
    tile::arrive(shared().k[stage_of(num_k_blocks)].empty);
    if constexpr (kStagesArray) tile::arrive(array_slot(stage_of(num_k_blocks), consumer_number()).empty);
    if (is_last && kQStages == 1) tile::arrive(shared().q[0].empty);
  }

  // Replace the scores of a step by weights, after its maxima are updated, and rescale O.
  static CUFLASH_DEVICE void make_p(Scores& s, Softmax& softmax, Output& o, bool max_has_risen,
                                    const float (&factor)[Softmax::kRows]) {
    if (max_has_risen) Softmax::rescale(o, factor);
    if (softmax.max_reasons & Softmax::kLargeMax) softmax.subtract_max(s);
    softmax.exp_scores(s, shared().softmax_scale_log2);
  }

  // Wait for the product with V of the previous step, which is added to O, and release this V.
  static CUFLASH_DEVICE void wait_output(Output& o, unsigned num_k_blocks) {
    tile::wait_wgmma<0>(o);
    tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);
  }

  // Operands of the next products: Q, K of block `num_k_blocks`, and V of the previous block. Descriptors and barriers
  // are read while weights are computed: the same loads would have a high latency during products.
  class NextOperands {
   public:
    NextOperands() = default;
    CUFLASH_DEVICE NextOperands(int group, unsigned num_tiles_done, unsigned num_k_blocks)
        : q_(q_operand(group, num_tiles_done)),
          k_(k_smem(stage_of(num_k_blocks))),
          v_(v_smem(stage_of(num_k_blocks - 1))),
          has_k_(kTestsBarriersEarly &&
                 tile::try_wait_full(shared().k[stage_of(num_k_blocks)], phase_of(num_k_blocks))),
          has_v_(kTestsBarriersEarly &&
                 tile::try_wait_full(shared().v[stage_of(num_k_blocks - 1)], phase_of(num_k_blocks - 1))) {
      q_.descriptor.materialize();
      k_.descriptor.materialize();
      v_.descriptor.materialize();
    }

    // Start both products; the weights must be ready. Return the flags of the block of K.
    CUFLASH_DEVICE int start_products(Scores& s, Output& o, const PackedP& p, int group, unsigned num_k_blocks) const {
      if (!has_k_) tile::wait_full(shared().k[stage_of(num_k_blocks)], phase_of(num_k_blocks));
      if (!has_v_) tile::wait_full(shared().v[stage_of(num_k_blocks - 1)], phase_of(num_k_blocks - 1));
      const int flags = flags_of_warpgroup(group, num_k_blocks);
      ping_pong_wait();
      tile::start_gemm_nt(s, q_, k_);
      tile::start_gemm_add_nn(o, p, v_);
      ping_pong_signal();
      return flags;
    }

   private:
    QOperand q_;
    KOperand k_;
    VOperand v_;
    bool has_k_, has_v_;
  };

  // Return whether a step is plain: unmasked, without a maximum, and not the last one. Plain steps have separate
  // straight-line code, since jumps wait for instruction fetches.
  static CUFLASH_DEVICE bool is_plain(int flags) {
    constexpr int kPlainFlags = StepMessage::kSkipMax | StepMessage::kUnmasked;
    return (flags & (kPlainFlags | StepMessage::kLastForWarpgroup)) == kPlainFlags;
  }

  // Process the scores of a step that is not plain, or of a plain step whose scores have been overwritten
  // (`scores_are_lost`). Return whether the scores have become weights; otherwise they are masked scores.
  static CUFLASH_DEVICE bool process_other_block(const attention::Params& params, const ScoresOfTile& of_tile,
                                                 const score::Function& function, Scores& s, Softmax& softmax,
                                                 unsigned num_tiles_done, unsigned num_k_blocks, int flags,
                                                 bool scores_are_lost, ChosenArgument chosen) {
    bool p_is_ready = false;
    if constexpr (kPacksQueries)
      if (flags & StepMessage::kNoMember) {  // only other warps of the tile visit the block
        s.fill(0);
        release_k(num_k_blocks, flags & StepMessage::kLastForWarpgroup);
        return true;
      }
    if constexpr (kSkipsMaxOnMasked) {
#pragma unroll 1
      for (int recomputes = scores_are_lost; recomputes < 2 && !p_is_ready; ++recomputes) {
        if (recomputes) recompute_scores(of_tile, function, s, num_tiles_done, num_k_blocks);
        if (!(flags & StepMessage::kUnmasked)) negate_and_mask(params, s, num_tiles_done, num_k_blocks, chosen);
        if (!(flags & StepMessage::kSkipMax) || recomputes) break;
        p_is_ready = softmax.try_exp_with_stale_max(s, shared().softmax_scale_log2);
      }
      release_k(num_k_blocks, flags & StepMessage::kLastForWarpgroup);
    } else {
      if (scores_are_lost) recompute_scores(of_tile, function, s, num_tiles_done, num_k_blocks);
      if (!(flags & StepMessage::kUnmasked)) negate_and_mask(params, s, num_tiles_done, num_k_blocks, chosen);
      release_k(num_k_blocks, flags & StepMessage::kLastForWarpgroup);
    }
    return p_is_ready;
  }

  // Return kSkipMax if the next step may skip the maximum. It may not after a step that skipped it and lost its scores.
  static CUFLASH_DEVICE int next_flags(int flags, bool p_is_ready, const Softmax& softmax, bool max_has_risen) {
    const bool scores_are_lost = (kSkipsMaxOnMasked ? flags & StepMessage::kSkipMax : is_plain(flags)) && !p_is_ready;
    const bool may_rise_again = kHasScore && max_has_risen;
    return ptx::opaque(scores_are_lost | may_rise_again | softmax.max_reasons) ? 0 : StepMessage::kSkipMax;
  }

  // Add the product with the last V of a tile to O.
  static CUFLASH_DEVICE void add_last_v(Output& o, const PackedP& p, unsigned num_k_blocks) {
    tile::wait_full(shared().v[stage_of(num_k_blocks - 1)], phase_of(num_k_blocks - 1));
    tile::start_gemm_add_nn(o, p, VOperand(v_smem(stage_of(num_k_blocks - 1))));
    tile::wait_wgmma<0>(o);
    tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);
  }

  // Run a consumer warpgroup with one stage of Q.
  static CUFLASH_DEVICE void consume_with_one_q_stage(const attention::Params& params, const TensorMaps& maps,
                                                      int group, SinkArgument sink, const score::Function& function,
                                                      DropoutArgument dropout, PagesArgument pages,
                                                      ChosenArgument chosen) {
    unsigned num_k_blocks = 0;
    for (unsigned num_tiles_done = 0; wait_tile(num_tiles_done); ++num_tiles_done) {
      Softmax softmax;
      ScoresOfTile of_tile;
      Output o;
      Scores s;
      PackedP p;
      o.fill(0);
      Kept kept;
      prepare_tile_score(of_tile, function, num_tiles_done, pages);
      int flags = start_first_scores(s, group, num_tiles_done, num_k_blocks, false);
      draw_step(params, dropout, kept, num_tiles_done, num_k_blocks);
      for (bool is_first = true;; is_first = false) {
        const bool is_last = flags & StepMessage::kLastForWarpgroup, was_plain = is_plain(flags);
        score_step(of_tile, function, s, num_k_blocks);
        bool p_is_ready = was_plain && softmax.try_exp_with_stale_max(s, shared().softmax_scale_log2);
        bool max_has_risen = false;
        if (p_is_ready) {
          release_k(num_k_blocks, false);
          wait_output(o, num_k_blocks);
          pack_step(p, s, kept);
        } else {
          float factor[Softmax::kRows];
          p_is_ready = process_other_block(params, of_tile, function, s, softmax, num_tiles_done, num_k_blocks, flags,
                                           was_plain, chosen);
          max_has_risen = !p_is_ready && softmax.update_max(s, shared().softmax_scale_log2, factor);
          tile::wait_wgmma<0>(o);
          if (!is_first) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);
          if (!p_is_ready) make_p(s, softmax, o, max_has_risen, factor);
          pack_step(p, s, kept);
        }
        ++num_k_blocks;
        if (is_last) break;
        flags = next_flags(flags, p_is_ready, softmax, max_has_risen) |
                NextOperands(group, num_tiles_done, num_k_blocks).start_products(s, o, p, group, num_k_blocks);
        draw_step(params, dropout, kept, num_tiles_done, num_k_blocks);
        tile::wait_wgmma<1>(s);
      }
      add_last_v(o, p, num_k_blocks);
      if (!(flags & StepMessage::kLastOfTile)) skip_blocks(group, num_k_blocks, false);
      epilogue(params, maps, num_tiles_done, softmax, o, true, sink, dropout, chosen);
    }
  }

  // Run a consumer warpgroup with two stages of Q. If the warpgroup takes part in all steps of a tile, the first scores
  // of the next tile are multiplied during the last step of this one, and the results of this tile are written once the
  // next tile has its first weights.
  static CUFLASH_DEVICE void consume_with_two_q_stages(const attention::Params& params, const TensorMaps& maps,
                                                       int group, SinkArgument sink, const score::Function& function,
                                                       DropoutArgument dropout, PagesArgument pages,
                                                       ChosenArgument chosen) {
    unsigned num_k_blocks = 0, num_tiles_done = 0;
    while (wait_tile(num_tiles_done)) {
      Softmax softmax, previous_softmax;
      ScoresOfTile of_tile;
      Output o;
      Scores s;
      PackedP p;
      o.fill(0);
      Kept kept;
      prepare_tile_score(of_tile, function, num_tiles_done, pages);
      int flags = start_first_scores(s, group, num_tiles_done, num_k_blocks, num_k_blocks > 0);
      draw_step(params, dropout, kept, num_tiles_done, num_k_blocks);
      while (true) {
        NextOperands next_operands;
        const bool is_last = flags & StepMessage::kLastForWarpgroup, is_first = flags & StepMessage::kEpiloguePending,
                   was_plain = is_plain(flags);
        score_step(of_tile, function, s, num_k_blocks);
        bool p_is_ready = was_plain && softmax.try_exp_with_stale_max(s, shared().softmax_scale_log2);
        bool max_has_risen = false;
        if (p_is_ready) {
          release_k(num_k_blocks, false);
          wait_output(o, num_k_blocks);
          if (flags & StepMessage::kOStoreInFlight) release_q(num_tiles_done - 1);
          ++num_k_blocks;
          next_operands = NextOperands(group, num_tiles_done, num_k_blocks);
          pack_step(p, s, kept);
        } else {
          float factor[Softmax::kRows];
          p_is_ready = process_other_block(params, of_tile, function, s, softmax, num_tiles_done, num_k_blocks, flags,
                                           was_plain, chosen);
          max_has_risen = !p_is_ready && softmax.update_max(s, shared().softmax_scale_log2, factor);
          tile::wait_wgmma<0>(o);
          if (num_k_blocks > 0) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);
          if (is_first) {
            epilogue(params, maps, num_tiles_done - 1, previous_softmax, o, false, sink, dropout, chosen);
            o.fill(0);
          }
          if (!p_is_ready) make_p(s, softmax, o, max_has_risen && !is_first, factor);
          pack_step(p, s, kept);
          if (flags & StepMessage::kOStoreInFlight || is_first && is_last) release_q(num_tiles_done - 1);
          ++num_k_blocks;
          if (is_last) {
            ++num_tiles_done;
            if (!(flags & StepMessage::kLastOfTile) || !wait_tile(num_tiles_done)) break;
            previous_softmax = softmax;
            softmax = Softmax();
            prepare_tile_score(of_tile, function, num_tiles_done, pages);
          }
          next_operands = NextOperands(group, num_tiles_done, num_k_blocks);
        }
        // computed before the wait for scores
        flags = next_flags(flags, p_is_ready, softmax, max_has_risen) | is_last * StepMessage::kEpiloguePending |
                (is_first && !is_last) * StepMessage::kOStoreInFlight |
                next_operands.start_products(s, o, p, group, num_k_blocks);
        draw_step(params, dropout, kept, num_tiles_done, num_k_blocks);
        tile::wait_wgmma<1>(s);
      }
      add_last_v(o, p, num_k_blocks);
      if (!(flags & StepMessage::kLastOfTile)) skip_blocks(group, num_k_blocks, true);
      epilogue(params, maps, num_tiles_done - 1, softmax, o, true, sink, dropout, chosen);
      release_q(num_tiles_done - 1);
      if (flags & StepMessage::kLastOfTile) return;
    }
  }

  // Run a consumer warpgroup.
  static CUFLASH_DEVICE void consume(const attention::Params& params, const TensorMaps& maps, int group,
                                     SinkArgument sink, const score::Function& function, DropoutArgument dropout,
                                     PagesArgument pages, ChosenArgument chosen) {
    if (group == kNumConsumers) ping_pong_signal();
    if constexpr (kQStages == 1) consume_with_one_q_stage(params, maps, group, sink, function, dropout, pages, chosen);
    else consume_with_two_q_stages(params, maps, group, sink, function, dropout, pages, chosen);
    if (group == 1) ping_pong_wait();  // consumes the last signal, for which no other warpgroup waits
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps, SinkArgument sink,
                                 PagesArgument pages, ScalesArgument scales, DropoutArgument dropout,
                                 const score::Function& score_function, StagedMapArgument staged_map,
                                 ChosenArgument chosen) {
    // uniform in the warp, so that branches do not diverge
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
    if (threadIdx.x == 0) {
      init_barriers();
      shared().softmax_scale_log2 = Softmax::scale_log2(attention::exponent_scale(params.shape));
      if constexpr (kHasScore) shared().softmax_scale = params.shape.softmax_scale;
    }
    __syncthreads();
    if (group == 0) {
      if constexpr (kReallocatesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
      produce<ForwardHooks<Config>>(params, maps, sink, pages, scales, score_function, staged_map, chosen);
    } else if (kHasDrawers && group == kNumConsumers + 1) {
      ptx::setmaxnreg_dec<kDrawerRegisters>();
      draw_steps<Scores>(params, dropout);
    } else {
      if constexpr (kReallocatesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(params, maps, group, sink, score_function, dropout, pages, chosen);
    }
  }
};

constexpr int kSharedBytes = Forward::kArraysEnd;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::Forward::kThreads, cuflash::Config::kMinBlocks)
sm90_forward(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::sm90::TensorMaps maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  Forward::run(params, maps, sink, pages, scales, dropout, score_function, staged_map, chosen);
}
