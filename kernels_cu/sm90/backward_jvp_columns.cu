// The tangents of dK and dV of one tile of keys on Hopper, up to 128 columns, summed over the query heads that share
// it. A tile has 64 keys for each consumer warpgroup. One warp loads keys, values and their tangents once, and the
// queries of each step with their dO, tangents and statistics. Scores are transposed: rows are keys, which a warpgroup
// keeps in registers. Results are bitwise reproducible.
// score_gradient_mma.cuh is included first, since the `probability` with the approximate exponential must be declared
// before it is used.
#include <attention/score_gradient_mma.cuh>
#include <attention/block_iterator.cuh>
#include <attention/gradient_tangents.cuh>
#include <attention/mask_keys_mma.cuh>
#include <sm90/epilogue_gradient.cuh>
#include <sm90/tangent_products.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

namespace cuflash::sm90 {

struct BackwardJvpColumns : GradientEpilogue<Config> {
  static constexpr int kNumConsumers = kBlockKv / 64;
  // Registers per thread of each role, if two consumer warpgroups share those of a multiprocessor.
  static constexpr int kProducerRegisters = 56;  // for statistics of queries
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;
  static_assert(kNumConsumers <= 2 && kThreads == kWarpgroupThreads * (1 + kNumConsumers), "a warpgroup has 64 rows");
  static_assert(!kHasScore && !Config::kHasDropout, "other kernels serve these calls");

  using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kNumConsumers>;
  using Dk = tile::WarpTile<1, kHeadDim / 8, 4 * kNumConsumers>;
  using Dv = tile::WarpTile<1, kValueDim / 8, 4 * kNumConsumers>;
  using Weights = tile::PackedOperand<Element, Scores>;
  using Statistics = attention::QueryTangents<float>;

  // Tiles in shared memory: keys and values with their tangents, then the queries of each stage, dO, and their tangents.
  using SmemK = tile::WgmmaTile<Element, kBlockKv, kHeadDim>;
  using SmemV = tile::WgmmaTile<Element, kBlockKv, kValueDim>;
  using SmemQ = tile::WgmmaTile<Element, kBlockQ, kHeadDim>;
  using SmemDo = tile::WgmmaTile<Element, kBlockQ, kValueDim>;
  static constexpr SmemK k_smem{0};
  static constexpr SmemV v_smem{SmemK::kBytes};
  static constexpr SmemK k_dot_smem{v_smem.start + SmemV::kBytes};
  static constexpr SmemV v_dot_smem{k_dot_smem.start + SmemK::kBytes * Config::kHasKDot};
  static constexpr int kStagesOffset = v_dot_smem.start + SmemV::kBytes * Config::kHasVDot;
  static constexpr int kDotsOffset = SmemQ::kBytes + SmemDo::kBytes;  // from the start of a stage
  static constexpr int kStageBytes = kDotsOffset + SmemQ::kBytes * Config::kHasQDot + SmemDo::kBytes * Config::kHasDoDot;
  static CUFLASH_DEVICE SmemQ q_smem(int stage) { return {kStagesOffset + stage * kStageBytes}; }
  static CUFLASH_DEVICE SmemDo do_smem(int stage) { return {q_smem(stage).start + SmemQ::kBytes}; }
  static CUFLASH_DEVICE SmemQ q_dot_smem(int stage) { return {q_smem(stage).start + kDotsOffset}; }
  static CUFLASH_DEVICE SmemDo do_dot_smem(int stage) {
    return {q_dot_smem(stage).start + SmemQ::kBytes * Config::kHasQDot};
  }
  static constexpr int kKeyOperands = 2 + Config::kHasKDot + Config::kHasVDot;
  static constexpr int kStepOperands = 2 + Config::kHasQDot + Config::kHasDoDot;

  // The producer's message about a step. kMasked: some key of the tile is hidden from some query. kEnd: the tile has no
  // further step, and this one has no queries.
  struct StepMessage {
    enum Flag { kMasked = 1, kEnd = 2 };
    attention::KvBlock block;
    int head, flags;
  };
  struct SharedStorage {
    Statistics statistics[kNumStages][kBlockQ];
    tile::PipelineSlot keys, queries[kNumStages];
    StepMessage messages[kNumStages];
  };
  static constexpr int kStorageOffset = kStagesOffset + kNumStages * kStageBytes;
  static CUFLASH_DEVICE SharedStorage& shared() {
    return *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared<unsigned char>() + kStorageOffset);
  }
  static CUFLASH_DEVICE int stage_of(unsigned num_steps) { return num_steps % kNumStages; }
  static CUFLASH_DEVICE int phase_of(unsigned num_steps) { return num_steps / kNumStages % 2; }

  // Start to copy rows first <= x < last of a head's matrix into a slot: by TMA or, if `threads_copy` or TMA cannot,
  // by the warp, which sets other rows and rows that are not valid to 0. Called by a warp.
  template <class Smem, class IsRowValid>
  static CUFLASH_DEVICE void load_rows(Smem to, const TensorMapParam& map, const attention::Matrices& matrices,
                                       const attention::BatchHead& batch_head, int head, int num_columns, int first,
                                       int last, const tile::PipelineSlot& slot, bool threads_copy,
                                       IsRowValid is_row_valid) {
    if (has_tensor_map(map, matrices) && !threads_copy) {
      if (tile::lane() == 0)
        tile::tma_load_boxes<Element>(tile::TmaBoxes(to), map, tma_coords(matrices, batch_head, head), first, slot.full);
      else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&slot.full));
      return;
    }
    const auto all = attention::matrix<Element>(matrices, batch_head, head, 0, num_columns);
    tile::copy<32>(tile::TmaBoxes(to), all.rows(first, last), tile::lane(), is_row_valid);
    tile::arrive(slot.full);
  }

  // Load keys, values and their tangents. Called by a warp.
  static CUFLASH_DEVICE void load_keys(const attention::Params& params, const TensorMaps& maps,
                                       const TangentOperands& dots, const attention::WorkTile& work) {
    const attention::Shape& shape = params.shape;
    const int kv_head = work.batch_head.head / shape.group_size;
    const auto load = [&](auto to, const TensorMapParam& map, const attention::Matrices& matrices, int num_columns) {
      load_rows(to, map, matrices, work.batch_head, kv_head, num_columns, work.first, work.last, shared().keys, false,
                [](int) { return true; });
    };
    load(k_smem, maps.k, params.k, shape.head_dim);
    load(v_smem, maps.v, params.v, shape.value_dim);
    if constexpr (Config::kHasKDot) load(k_dot_smem, dots.maps.k, dots.arrays.k_dot, shape.head_dim);
    if constexpr (Config::kHasVDot) load(v_dot_smem, dots.maps.v, dots.arrays.v_dot, shape.value_dim);
  }

  // Load the queries of a step, their dO, tangents and statistics, into an empty slot. Rows past the step become 0,
  // since they may hold NaN, as do the dO of queries without a key. Called by a warp.
  static CUFLASH_DEVICE void load_step(const attention::Params& params, const TensorMaps& maps,
                                       const TangentOperands& dots, const attention::BatchHead& batch_head,
                                       const attention::KvBlock& block, int stage) {
    const attention::Shape& shape = params.shape;
    const bool is_cut = block.stop - block.start < kBlockQ && block.stop < shape.seqlen_q;
    Statistics* const statistics = shared().statistics[stage];
    const auto load = [&](auto to, const TensorMapParam& map, const attention::Matrices& matrices, int num_columns,
                          bool threads_copy, auto is_row_valid) {
      load_rows(to, map, matrices, batch_head, batch_head.head, num_columns, block.start, block.stop,
                shared().queries[stage], threads_copy, is_row_valid);
    };
    const auto is_any = [](int) { return true; };
    load(q_smem(stage), maps.q, params.q, shape.head_dim, is_cut, is_any);
    if constexpr (Config::kHasQDot) load(q_dot_smem(stage), dots.maps.q, dots.arrays.q_dot, shape.head_dim, is_cut, is_any);
    bool has_empty_rows = false;
    for (int row = tile::lane(); row < kBlockQ; row += 32) {
      const int query = block.start + row;
      statistics[row] = attention::query_tangents<float>(params, dots.arrays, batch_head, query, query < block.stop);
      has_empty_rows |= query < block.stop && statistics[row].lse_2 == -ptx::negative_infinity<float>();
    }
    const bool clears = __any_sync(0xffffffffu, has_empty_rows) || is_cut;
    __syncwarp();  // all statistics are stored
    const auto has_key = [&](int row) { return statistics[row].lse_2 != -ptx::negative_infinity<float>(); };
    load(do_smem(stage), maps.do_, params.do_, shape.value_dim, clears, has_key);
    if constexpr (Config::kHasDoDot)
      load(do_dot_smem(stage), dots.maps.do_, dots.arrays.do_dot, shape.value_dim, clears, has_key);
  }

  // Load all steps, and write the message of each. Called by a warp.
  static CUFLASH_DEVICE void produce(const attention::Params& params, const TensorMaps& maps,
                                     const TangentOperands& dots, attention::WorkTile work) {
    using namespace attention;
    load_keys(params, maps, dots, work);
    const bool is_whole = work.last - work.first == kBlockKv;
    const int first_head = work.batch_head.head;
    unsigned num_steps = 0;
    // Wait for the next slot, and write its message.
    const auto start_step = [&](const KvBlock& block, int flags) {
      const int stage = stage_of(num_steps);
      tile::wait_empty(shared().queries[stage], phase_of(num_steps));
      __syncwarp();
      if (tile::lane() == 0) shared().messages[stage] = {block, work.batch_head.head, flags};
      __syncwarp();  // the message is written before the barrier's last arrival
      ++num_steps;
      return stage;
    };
#pragma unroll 1
    for (int head = first_head; head < first_head + params.shape.group_size; ++head) {
      work.batch_head.head = head;
      const VisitRange visit_range = visit_range_of_keys(params, work);
      BlockIterator<kBlockQ, OverQBlocks, Listed> blocks(params, visit_range);
      for (KvBlock block; blocks.next(block);) {
        const bool is_masked = !is_whole || !is_unmasked<kBlockQ>(block);
        const int stage = start_step(block, is_masked ? StepMessage::kMasked : 0);
        load_step(params, maps, dots, work.batch_head, block, stage);
      }
    }
    const int stage = start_step({}, StepMessage::kEnd);
    for (int i = 0; i < kStepOperands; ++i) tile::arrive(shared().queries[stage].full);
  }

  // Replace products by P, P_dot, dS and dS_dot, as `gradient_tangents` does.
  template <class IsAllowed>
  static CUFLASH_DEVICE void differentiate(const attention::Params& params, Scores& s, Scores& s_dot, Scores& dp,
                                           Scores& dp_dot, const Statistics* statistics,
                                           const score::Function& score_function, const attention::WorkTile& work,
                                           const attention::KvBlock& block, IsAllowed is_allowed) {
    attention::gradient_tangents<attention::Rows::kKeys>(
        s, s_dot, dp, dp_dot, score_function, params, work, block, is_allowed,
        [&](int j) { return statistics[Scores::first_column() + Scores::column(j)]; });
  }

  // Add the products of a step to the dK and dV of a warpgroup.
  static CUFLASH_DEVICE void process_step(const attention::Params& params, int first_row, Dk& dk, Dv& dv,
                                          const score::Function& score_function, attention::WorkTile& work, int stage,
                                          int flags) {
    Scores s, s_dot, dp, dp_dot;
    if constexpr (!Config::kHasQDot && !Config::kHasKDot) s_dot.fill(0);
    if constexpr (!Config::kHasDoDot && !Config::kHasVDot) dp_dot.fill(0);
    start_with_tangents<Config::kHasKDot, Config::kHasQDot>(s, s_dot, k_smem, k_dot_smem, q_smem(stage),
                                                            q_dot_smem(stage), first_row);
    start_with_tangents<Config::kHasVDot, Config::kHasDoDot>(dp, dp_dot, v_smem, v_dot_smem, do_smem(stage),
                                                             do_dot_smem(stage), first_row);
    wait_products(s, s_dot, dp, dp_dot);
    const StepMessage& message = shared().messages[stage];
    const Statistics* const statistics = shared().statistics[stage];
    if (flags & StepMessage::kMasked) {
      work.batch_head.head = message.head;
      attention::mask_scores_of_keys(s, params, work, message.block);
      differentiate(params, s, s_dot, dp, dp_dot, statistics, score_function, work, message.block,
                    [&](int i, int j) { return !attention::is_masked_score(s.at(i, j)); });
    } else {
      differentiate(params, s, s_dot, dp, dp_dot, statistics, score_function, work, message.block,
                    [](int, int) { return true; });
    }
    using Q = tile::MnMajor<SmemQ>;
    using Do = tile::MnMajor<SmemDo>;
    Weights p, p_dot, ds, ds_dot;
    p_dot = s_dot;
    ds_dot = dp_dot;
    if constexpr (Config::kHasDoDot) p = s;
    if constexpr (Config::kHasQDot) ds = dp;
    tile::start_gemm_add_nn(dv, p_dot, Do(do_smem(stage)));
    if constexpr (Config::kHasDoDot) tile::start_gemm_add_nn(dv, p, Do(do_dot_smem(stage)));
    tile::start_gemm_add_nn(dk, ds_dot, Q(q_smem(stage)));
    if constexpr (Config::kHasQDot) tile::start_gemm_add_nn(dk, ds, Q(q_dot_smem(stage)));
    tile::wait_wgmma<0>(dk);
    ptx::fence_registers(tile::accumulators(dv));
    tile::arrive(shared().queries[stage].empty);
  }

  // Run a consumer warpgroup.
  static CUFLASH_DEVICE void consume(const attention::Params& params, int group, const score::Function& score_function,
                                     attention::WorkTile work) {
    const int first_row = 64 * (group % kNumConsumers);  // as in WarpTile
    const int kv_head = work.batch_head.head / params.shape.group_size;
    Dk dk;
    Dv dv;
    dk.fill(0);
    dv.fill(0);
    tile::wait_full(shared().keys, 0);
    for (unsigned num_steps = 0;; ++num_steps) {
      const int stage = stage_of(num_steps);
      tile::wait_full(shared().queries[stage], phase_of(num_steps));
      const int flags = shared().messages[stage].flags;
      if (flags & StepMessage::kEnd) break;
      process_step(params, first_row, dk, dv, score_function, work, stage, flags);
    }
    dk.scale(params.shape.softmax_scale);
    write_gradient(params.dk, work, kv_head, params.shape.head_dim, dk);
    write_gradient(params.dv, work, kv_head, params.shape.value_dim, dv);
  }

  // Run a thread block.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps, const TangentOperands& dots,
                                 const score::Function& score_function) {
    // uniform in the warp, so that branches do not diverge
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
    const attention::WorkTile work = attention::key_tile<Listed>(params, kBlockKv);
    if (work.is_empty()) return;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&shared().keys.full), kKeyOperands * tile::kArrivalsPerWarp);
      for (const tile::PipelineSlot& slot : shared().queries) {
        ptx::mbarrier_init(ptx::shared_address(&slot.full), kStepOperands * tile::kArrivalsPerWarp);
        ptx::mbarrier_init(ptx::shared_address(&slot.empty), 4 * kNumConsumers * tile::kArrivalsPerWarp);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (group == 0) {
      if constexpr (kNumConsumers == 2) ptx::setmaxnreg_dec<kProducerRegisters>();
      if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == 0) produce(params, maps, dots, work);
    } else {
      if constexpr (kNumConsumers == 2) ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(params, group, score_function, work);
    }
  }
};

constexpr int kSharedBytes =
    BackwardJvpColumns::kStorageOffset + static_cast<int>(sizeof(BackwardJvpColumns::SharedStorage));

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::BackwardJvpColumns::kThreads, cuflash::Config::kMinBlocks)
sm90_backward_jvp_columns(const __grid_constant__ cuflash::attention::Params params,
                          const __grid_constant__ cuflash::sm90::TensorMaps maps,
                          const __grid_constant__ cuflash::sm90::TensorMaps dot_maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  BackwardJvpColumns::run(params, maps, TangentOperands{tangents, dot_maps}, score_function);
}
