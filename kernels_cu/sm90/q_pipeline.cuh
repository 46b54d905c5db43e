#pragma once
#include <sm90/dq_writer.cuh>

// The pipeline of Hopper's backward passes. A thread block keeps a tile of keys and visits the blocks of queries that
// attend to them, over the query heads that share its key/value head. Then it takes the next tile, whose first queries
// have been loaded meanwhile. The producer warpgroup loads Q, dO and the statistics of each query (sm90/q_producer.cuh,
// sm90/q_copy_warps.cuh) and adds up dQ (sm90/dq_writer.cuh). Two consumer warpgroups multiply, or one if another
// kernel computes dQ. This file has the barriers of consumers and the roles of warps.
namespace cuflash::sm90 {

template <class Config>
struct QPipeline : DqWriter<Config> {
  using Base = DqWriter<Config>;
  using typename Base::PipelineState, typename Base::SharedStorage, typename Base::StepMessage;
  using typename Base::ChosenArgument;
  using Base::dq_writer, Base::dq_writer_fused, Base::kConsumerRegisters, Base::kCopyThreads, Base::kDoStages,
      Base::kHasDqWriter, Base::kNumConsumers, Base::kNumStages, Base::kPacksQueries, Base::kProducerRegisters,
      Base::kProducerThreads, Base::kSkipsClamp, Base::k_phase, Base::prepare_steps, Base::produce_steps, Base::shared,
      Base::v_phase;

  // Wait for a step, and return its flags. Call it before starting the products of the step, because loads from shared
  // memory have a high latency during products.
  static CUFLASH_DEVICE int wait_step(const PipelineState& state) {
    SharedStorage& smem = shared();
    tile::wait_full(smem.q[state.stage], state.phase);
    int flags = smem.messages[state.stage].flags;
    if constexpr (kSkipsClamp) flags |= smem.queries[state.stage].stats.has_large_lse ? StepMessage::kLargeLse : 0;
    // With a score function, results of queries for which it hides all keys must not matter.
    if constexpr (kHasScore || kPacksQueries) flags |= smem.queries[state.stage].stats.has_empty_rows ? StepMessage::kLargeLse : 0;
    return flags;
  }

  // Return whether a step is the first one of the next tile, or the end of all work.
  static CUFLASH_DEVICE bool starts_next_tile(int flags) {
    return flags & (StepMessage::kLoadsV | StepMessage::kEndOfWork);
  }

  // If a step loads K for another head, release the previous K, whose products have ended, and wait for the new K.
  static CUFLASH_DEVICE void wait_next_head_k(int flags) {
    if ((flags & (StepMessage::kLoadsK | StepMessage::kLoadsV)) != StepMessage::kLoadsK) return;
    SharedStorage& smem = shared();
    tile::arrive(smem.k.empty);
    tile::wait_full(smem.k, k_phase(flags));
  }

  // Wait for K and V of a tile, at its first step. The second function releases both.
  static CUFLASH_DEVICE void wait_kv(int flags) {
    SharedStorage& smem = shared();
    tile::wait_full(smem.k, k_phase(flags));
    tile::wait_full(smem.v, v_phase(flags));
  }
  static CUFLASH_DEVICE void release_kv() { tile::arrive(shared().k.empty); }  // K and V are released together

  // Run the role of each warp of a thread block. The consumer warpgroups call `consume` with their index among the
  // consumers.
  template <class Consume>
  static CUFLASH_DEVICE void run_roles(const attention::Params& params, const TensorMaps& maps,
                                       const QueryState& query_state, Consume consume, const score::Function& score,
                                       StagedMapArgument staged_map, ChosenArgument chosen) {
    // uniform in the warp, so that branches do not diverge
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
    if (threadIdx.x == 0) {
      shared().softmax_scale_log2 = params.shape.softmax_scale * (kHasScore ? 1 : attention::kLog2E);
      shared().has_tile = shared().kv_phases = 0;
      tile::PipelineSlot* const slots = &shared().k;
      for (int i = 0; i < 2 + kNumStages + kDoStages; ++i) {
        // the dQ writer reads messages too
        const bool has_messages = &slots[i] >= shared().q && &slots[i] < shared().q + kNumStages;
        ptx::mbarrier_init(ptx::shared_address(&slots[i].full), 1 + kCopyThreads / 32 * tile::kArrivalsPerWarp);
        ptx::mbarrier_init(ptx::shared_address(&slots[i].empty),
                           (4 * kNumConsumers + (kHasDqWriter && has_messages)) * tile::kArrivalsPerWarp);
      }
      for (uint64_t& message_ready : shared().message_ready) ptx::mbarrier_init(ptx::shared_address(&message_ready), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared().dq_sum_loaded), 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (group == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      if (warp == 0) produce_steps(params, maps, query_state, score, staged_map, chosen);
      else if (32 * warp < kProducerThreads) prepare_steps(params, maps, score, chosen);
      else if constexpr (Config::kLastFinishesDq) dq_writer_fused();
      else if constexpr (kHasDqWriter) dq_writer();
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(group % kNumConsumers);
    }
  }
};

}  // namespace cuflash::sm90
