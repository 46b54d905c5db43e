#pragma once
#include <sm90/kv_pipeline.cuh>
#include <sm90/tangent_products.cuh>

// The pipeline over keys of kernels that differentiate along tangents: the tangent of an operand shares its slot. One
// or two consumer warpgroups multiply 64 queries each, and one multiplies while the other computes weights.
namespace cuflash::sm90 {

template <class Config>
struct TangentPipeline : KvPipeline<Config> {
  using Base = KvPipeline<Config>;
  using typename Base::ChosenArgument, typename Base::PagesArgument, typename Base::ScalesArgument,
      typename Base::SinkArgument, typename Base::SmemK, typename Base::SmemQ, typename Base::StepMessage;
  using Base::flags_of_warpgroup, Base::init_barriers, Base::kBlockKv, Base::kNumConsumers, Base::kPacksQueries,
      Base::kThreads, Base::k_dot_smem, Base::k_smem, Base::phase_of, Base::q_dot_smem, Base::q_smem, Base::shared,
      Base::stage_of;

  // Registers per thread of each role, if two consumer warpgroups share those of a multiprocessor.
  static constexpr int kProducerRegisters = Config::kIsListed ? 40 : 24;  // to walk a list
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;
  static_assert(kNumConsumers <= 2 && kThreads == kWarpgroupThreads * (1 + kNumConsumers), "a warpgroup has 64 rows");
  static_assert(!kPacksQueries && !kHasScore && !Config::kHasDropout, "other kernels serve these calls");

  using Scores = tile::WarpTile<1, kBlockKv / 8, 4 * kNumConsumers>;

  // Return the first of a warpgroup's rows in the tiles of queries.
  static CUFLASH_DEVICE int first_row(int group) { return 64 * (group % kNumConsumers); }  // as in WarpTile

  // Start the products of a step's scores and of their tangents, once K has arrived.
  static CUFLASH_DEVICE void start_scores(Scores& s, Scores& s_dot, int group, int stage) {
    start_with_tangents<Config::kHasQDot, Config::kHasKDot>(s, s_dot, q_smem(0), q_dot_smem(0), k_smem(stage),
                                                            k_dot_smem(stage), first_row(group));
  }

  // Call `visit(stage, phase, flags)` for the steps of a tile in which queries of the warpgroup see keys, once K has
  // arrived. `visit` releases the slots of these steps; those of other steps are released unread.
  template <class Visit>
  static CUFLASH_DEVICE void visit_steps(int group, unsigned& num_blocks, Visit visit) {
    typename Base::SharedStorage& smem = shared();
    for (bool is_done = false, is_end = false; !is_end; ++num_blocks) {
      const int stage = stage_of(num_blocks), phase = phase_of(num_blocks);
      tile::wait_full(smem.k[stage], phase);
      const int flags = flags_of_warpgroup(group, num_blocks);
      is_end = flags & StepMessage::kLastOfTile;
      if (is_done) {
        tile::arrive(smem.k[stage].empty);
        tile::wait_full(smem.v[stage], phase);
        tile::arrive(smem.v[stage].empty);
        continue;
      }
      is_done = flags & StepMessage::kLastForWarpgroup;
      visit(stage, phase, flags);
    }
  }

  // Run the roles of a thread block: the producer warps, and `consume(group)` in each consumer warpgroup.
  template <class Hooks, class Consume>
  static CUFLASH_DEVICE void run_roles(const attention::Params& params, const TensorMaps& maps,
                                       const TensorMaps& dot_maps, const attention::Tangents& tangents,
                                       SinkArgument sink, PagesArgument pages, ScalesArgument scales,
                                       const score::Function& score_function, StagedMapArgument staged_map,
                                       ChosenArgument chosen, Consume consume) {
    // uniform in the warp, so that branches do not diverge
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
    if (threadIdx.x == 0) {
      init_barriers();
      shared().softmax_scale_log2 = params.shape.softmax_scale * attention::kLog2E;
    }
    __syncthreads();
    if (group == 0) {
      if constexpr (kNumConsumers == 2) ptx::setmaxnreg_dec<kProducerRegisters>();
      Base::template produce<Hooks>(params, maps, sink, pages, scales, score_function, staged_map, chosen,
                                    TangentOperands{tangents, dot_maps});
    } else {
      if constexpr (kNumConsumers == 2) ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(group);
    }
  }
};

}  // namespace cuflash::sm90
