// The tangent of dQ on Hopper, up to 128 columns. A tile has 64 queries for each consumer warpgroup, their dO, and the
// tangents of both. Scores, dP, their tangents and dQ stay in registers. Results are bitwise reproducible.
// score_gradient_mma.cuh is included first, since the `probability` with the approximate exponential must be declared
// before it is used.
#include <attention/score_gradient_mma.cuh>
#include <attention/gradient_tangents.cuh>
#include <sm90/epilogue_gradient.cuh>
#include <sm90/tangent_pipeline.cuh>

namespace cuflash::sm90 {

struct BackwardJvpRows : TangentPipeline<Config> {
  using Dq = tile::WarpTile<1, kHeadDim / 8, 4 * kNumConsumers>;
  using Weights = tile::PackedOperand<Element, Scores>;
  using Statistics = attention::QueryTangents<float>;

  struct Hooks {
    // Write a tangent of 0 for queries that see no key. Called by a warp.
    static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                                SinkArgument, const attention::Tangents&) {
      GradientEpilogue<Config>::clear_rows(params.dq, work, work.batch_head.head, params.shape.head_dim);
    }
  };

  // Replace products by dS and dS_dot, as `gradient_tangents` does.
  template <class IsAllowed>
  static CUFLASH_DEVICE void differentiate(const attention::Params& params, Scores& s, Scores& s_dot, Scores& dp,
                                           Scores& dp_dot, const Statistics (&rows)[Scores::kRows],
                                           const score::Function& score_function, const attention::WorkTile& work,
                                           const attention::KvBlock& block, IsAllowed is_allowed) {
    attention::gradient_tangents<attention::Rows::kQueries>(s, s_dot, dp, dp_dot, score_function, params, work, block,
                                                            is_allowed, [&](int i) { return rows[i]; });
  }

  // Add the products of a step to the dQ of a warpgroup. V is released before the weights are computed, K at the end.
  static CUFLASH_DEVICE void process_step(const attention::Params& params, int group, Dq& dq,
                                          const Statistics (&rows)[Scores::kRows],
                                          const score::Function& score_function, const WorkTileInfo& tile_info,
                                          int stage, int phase, int flags, ChosenArgument chosen) {
    SharedStorage& smem = shared();
    Scores s, s_dot, dp, dp_dot;
    if constexpr (!Config::kHasQDot && !Config::kHasKDot) s_dot.fill(0);
    if constexpr (!Config::kHasDoDot && !Config::kHasVDot) dp_dot.fill(0);
    start_scores(s, s_dot, group, stage);
    tile::wait_full(smem.v[stage], phase);
    start_with_tangents<Config::kHasDoDot, Config::kHasVDot>(dp, dp_dot, do_smem(0), do_dot_smem(0), v_smem(stage),
                                                             v_dot_smem(stage), first_row(group));
    wait_products(s, s_dot, dp, dp_dot);
    tile::arrive(smem.v[stage].empty);
    if (flags & StepMessage::kLastForWarpgroup) tile::arrive(smem.q[0].empty);
    const StepMessage& message = smem.messages[stage];
    if (flags & StepMessage::kUnmasked) {
      differentiate(params, s, s_dot, dp, dp_dot, rows, score_function, tile_info.work, message.block,
                    [](int, int) { return true; });
    } else {
      mask_block(params, s, tile_info, message, chosen);
      differentiate(params, s, s_dot, dp, dp_dot, rows, score_function, tile_info.work, message.block,
                    [&](int i, int j) { return !attention::is_masked_score(s.at(i, j)); });
    }
    Weights ds_dot, ds;
    ds_dot = dp_dot;
    if constexpr (Config::kHasKDot) ds = dp;
    tile::start_gemm_add_nn(dq, ds_dot, tile::MnMajor<SmemK>(k_smem(stage)));
    if constexpr (Config::kHasKDot) tile::start_gemm_add_nn(dq, ds, tile::MnMajor<SmemK>(k_dot_smem(stage)));
    tile::wait_wgmma<0>(dq);
    tile::arrive(smem.k[stage].empty);
  }

  // Run a consumer warpgroup.
  static CUFLASH_DEVICE void consume(const attention::Params& params, const attention::Tangents& tangents, int group,
                                     const score::Function& score_function, ChosenArgument chosen) {
    unsigned num_blocks = 0;
    for (unsigned num_tiles_done = 0; wait_tile(num_tiles_done); ++num_tiles_done) {
      const WorkTileInfo& tile_info = shared().tile_infos[tile_info_index(num_tiles_done)];
      const attention::WorkTile work = tile_info.work;
      Statistics rows[Scores::kRows];
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) {
        const int query = work.first + Scores::first_row() + Scores::row(i);
        rows[i] = attention::query_tangents<float>(params, tangents, work.batch_head, query, query < work.last);
      }
      Dq dq;
      dq.fill(0);
      visit_steps(group, num_blocks, [&](int stage, int phase, int flags) {
        process_step(params, group, dq, rows, score_function, tile_info, stage, phase, flags, chosen);
      });
      dq.scale(params.shape.softmax_scale);
      GradientEpilogue<Config>::write_gradient(params.dq, work, work.batch_head.head, params.shape.head_dim, dq);
    }
  }
};

constexpr int kSharedBytes = BackwardJvpRows::kArraysEnd;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::BackwardJvpRows::kThreads, cuflash::Config::kMinBlocks)
sm90_backward_jvp_rows(const __grid_constant__ cuflash::attention::Params params,
                       const __grid_constant__ cuflash::sm90::TensorMaps maps,
                       const __grid_constant__ cuflash::sm90::TensorMaps dot_maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  BackwardJvpRows::run_roles<BackwardJvpRows::Hooks>(
      params, maps, dot_maps, tangents, sink, pages, scales, score_function, staged_map, chosen,
      [&](int group) { BackwardJvpRows::consume(params, tangents, group, score_function, chosen); });
}
