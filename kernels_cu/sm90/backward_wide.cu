// FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) on Hopper, above 128 columns. Registers cannot hold
// dK and dV of 128 keys, so a tile has fewer keys. Two warpgroups each compute S and dP of half of the keys. P and dS
// pass through shared memory, since each warpgroup computes dK and dV of all keys, transposed, for half of their
// columns. Each warpgroup adds half of the columns of dQ to sums in global memory.
#include <attention/for_each_score.cuh>
#include <ptx/store.cuh>
#include <sm90/q_pipeline.cuh>

namespace cuflash::sm90 {

struct BackwardWide : QPipeline<Config> {
  static_assert(kIsWide && kBlockQ == 64 && kBlockKv % 16 == 0, "a warpgroup has all queries, and half of the keys");

  // Register tile of scores: rows are queries, columns are the warpgroup's keys.
  using Scores = tile::WarpTile<1, kBlockKv / 16, 4, kNumConsumers>;
  using PackedScores = tile::PackedOperand<Element, Scores>;
  using TransposedScores = tile::WgmmaTile<Element, kBlockKv, kBlockQ>;  // P or dS of all keys
  static CUFLASH_DEVICE TransposedScores p_smem(bool is_odd) { return {kScoreOffset + is_odd * kScoreBytes}; }
  static constexpr TransposedScores ds_smem{kScoreOffset + 2 * kScoreBytes};

  // The part of dQ that a warpgroup computes at a time: of its half of the columns, the most that registers can hold.
  static constexpr int kDqSlices = kHeadDim > 192 ? 2 : 1;
  using DqSlice = tile::WarpTile<1, WarpDq::kColumnTiles / kDqSlices, 4, kNumConsumers>;
  using KSlice = tile::WgmmaTile<Element, kBlockKv, 8 * DqSlice::kColumnTiles, SmemK::kPanelWidth>;

  // A warpgroup's part of dK or dV, transposed: rows are columns of the gradient that correspond to whole panels of Q
  // or dO. If the number of panels is odd, both warpgroups compute the last panel, for half of the keys each.
  template <class Left>
  struct GradientPart {
    static constexpr int kPanelsPerWarpgroup = Left::kNumPanels / kNumConsumers;
    static constexpr bool kSharesLastPanel = Left::kNumPanels % kNumConsumers != 0;
    // number of products in addition to that of the first panel
    static constexpr int kOtherGemms = kPanelsPerWarpgroup - 1 + kSharesLastPanel;
    static constexpr int kLast = Left::kNumPanels - 1;
    static_assert(kPanelsPerWarpgroup == 1 || kPanelsPerWarpgroup == 2, "128 to 256 columns");
    using AllKeys = tile::WarpTile<1, kBlockKv / 8, 4>;
    using HalfOfKeys = tile::WarpTile<1, kBlockKv / 16, 4, kNumConsumers>;

    using Columns = tile::MnMajor<Left>;
    using Keys = tile::KMajor<TransposedScores>;

    AllKeys panels[kPanelsPerWarpgroup];
    HalfOfKeys last_panel;

    // Call visit(sums, panel, first key) for each of the parts.
    template <class Visit>
    CUFLASH_DEVICE void each(int part, Visit visit) {
#pragma unroll
      for (int x = 0; x < kPanelsPerWarpgroup; ++x) visit(panels[x], part * kPanelsPerWarpgroup + x, 0);
      if constexpr (kSharesLastPanel) visit(last_panel, kLast, part * kBlockKv / kNumConsumers);
    }

    // Start the product of the first panel. The second function starts those of the other panels.
    CUFLASH_DEVICE void start_first_sum(Left left, TransposedScores right, int part) {
      left = tile::warp_uniform(left);
      right = tile::warp_uniform(right);
      tile::start_gemm_add_tt(panels[0], Columns(left, part * kPanelsPerWarpgroup), Keys(right));
    }
    CUFLASH_DEVICE void start_other_sums(Left left, TransposedScores right, int part) {
      left = tile::warp_uniform(left);
      right = tile::warp_uniform(right);
      if constexpr (kPanelsPerWarpgroup > 1)
        tile::start_gemm_add_tt(panels[1], Columns(left, part * kPanelsPerWarpgroup + 1), Keys(right));
      if constexpr (kSharesLastPanel)
        tile::start_gemm_add_tt(last_panel, Columns(left, kLast), Keys(right, part * kBlockKv / kNumConsumers));
    }
    // Keep accesses to the sums from moving across this line. Called after the wait for the products.
    CUFLASH_DEVICE void fence_registers() {
      each(0, [](auto& sums, int, int) { ptx::fence_registers(tile::accumulators(sums)); });
    }
  };
  using WarpgroupDk = GradientPart<SmemQ>;
  using WarpgroupDv = GradientPart<SmemDo>;

  // Mask of a thread's scores; a byte of `bits` has the bits of eight of the warpgroup's keys.
  struct ThreadMask {
    static constexpr int kRowBytes = 4 * kKeyWords;
    const uint8_t* bits;
    int first;

    CUFLASH_DEVICE ThreadMask(const StageQueries& queries, int part)
        : bits(reinterpret_cast<const uint8_t*>(queries.row_masks) + Scores::first_row() * kRowBytes +
               part * kBlockKv / 16),
          first(ptx::lane() % 4 * 2) {}
    CUFLASH_DEVICE bool at(int i, int j) const {
      return bits[Scores::row(i) * kRowBytes + j / 2] >> (first + j % 2) & 1;
    }
  };

  // Replace q k^T by P.
  template <bool IsMasked>
  static CUFLASH_DEVICE void make_p(Scores& s, const StageQueries& queries, float softmax_scale_log2, int part) {
    const ThreadMask mask(queries, part);
    attention::for_each_score_by_rows<Scores>(
        [&](int i) { return queries.stats.lse_2[Scores::first_row() + Scores::row(i)]; },
        [&](int i, int j, float lse_2) {
          const float p = attention::probability(s.at(i, j), softmax_scale_log2, lse_2);
          s.at(i, j) = !IsMasked || mask.at(i, j) ? p : 0.0f;
        });
  }

  // Replace dP by dS = P (dP - delta).
  template <bool IsMasked>
  static CUFLASH_DEVICE void make_ds(Scores& p, Scores& dp, const StageQueries& queries, int part) {
    const ThreadMask mask(queries, part);
    attention::for_each_score_by_rows<Scores>(
        [&](int i) { return queries.stats.delta[Scores::first_row() + Scores::row(i)]; },
        [&](int i, int j, float delta) {
          dp.at(i, j) = !IsMasked || mask.at(i, j) ? attention::score_gradient(p.at(i, j), dp.at(i, j), delta) : 0.0f;
        });
  }

  // Return the same tile. Its address is recomputed at this place, to save registers for accumulators.
  template <class Tile>
  static CUFLASH_DEVICE Tile recomputed(Tile tile) {
    return tile::warp_uniform(Tile{ptx::opaque(tile.start)});
  }

  // Start the product for a step's scores. The next functions start dP, and a slice of dQ.
  static CUFLASH_DEVICE void start_s(Scores& s, const PipelineState& state, int part) {
    ptx::mark_undefined(tile::accumulators(s));
    tile::start_gemm_nt(s, tile::KMajor<SmemQ>(tile::warp_uniform(q_smem(state.stage))),
                        tile::KMajor<SmemK>(recomputed(k_smem), part * kBlockKv / kNumConsumers));
  }

  static CUFLASH_DEVICE void start_dp(Scores& dp, const PipelineState& state, int part) {
    tile::wait_full(shared().d_o[do_stage(state)], do_phase(state));
    ptx::mark_undefined(tile::accumulators(dp));
    tile::start_gemm_nt(dp, tile::KMajor<SmemDo>(tile::warp_uniform(do_smem(do_stage(state)))),
                        tile::KMajor<SmemV>(recomputed(v_smem), part * kBlockKv / kNumConsumers));
  }

  static CUFLASH_DEVICE void start_dq(DqSlice& dq, int part, int slice) {
    const KSlice k_slice{recomputed(k_smem).start + (part * kDqSlices + slice) * KSlice::kBytes};
    tile::start_gemm_tn(dq, tile::MnMajor<TransposedScores>(recomputed(ds_smem)), tile::MnMajor<KSlice>(k_slice));
  }

  // Store P or dS in shared memory, and wait until both warpgroups have stored theirs.
  static CUFLASH_DEVICE void publish_scores(TransposedScores to, const Scores& from, int part) {
    PackedScores rounded;
    rounded = from;
    tile::store_transposed(to, rounded, Scores::warp_row(), part * kBlockKv / kNumConsumers);
    ptx::fence_proxy_async();
    ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);
  }

  // Write columns of a transposed float32 gradient, from first_column on; it is summed over broadcast axes afterwards.
  template <class Sums>
  static CUFLASH_DEVICE void write_accumulators(const tile::Matrix<float>& to, Sums& sums, int first_key,
                                                int first_column) {
    const int key = first_key + ptx::lane() % 4 * 2, column = first_column + Sums::first_row();
    float* const first = &to.at(key, column);  // columns of a workspace are contiguous
#pragma unroll
    for (int j = 0; j < Sums::kColumns; ++j) {
      float* const row = first + Sums::column(j) * to.row_stride;
#pragma unroll
      for (int i = 0; i < Sums::kRows; ++i)
        ptx::store_if(key + Sums::column(j) < to.num_rows && column + Sums::row(i) < to.num_columns, row + Sums::row(i),
                      sums.at(i, j));
    }
  }
  // Round columns of a transposed gradient, and stage them in shared memory.
  template <class Staging, class Sums>
  static CUFLASH_DEVICE void store_packed(Staging to, const Sums& sums, int first_key, int first_column) {
    tile::PackedOperand<Element, Sums> rounded;
    rounded = sums;
    tile::store_transposed(to, rounded, first_column + Sums::warp_row(), first_key);
  }
  // Write or stage a warpgroup's part of dK or dV.
  template <class Left, class Staging>
  static CUFLASH_DEVICE void write_part(const attention::Matrices& to, const attention::WorkTile& work, int head,
                                        int num_columns, GradientPart<Left>& gradient, Staging staging, int part) {
    const auto float32_rows =
        attention::matrix<float>(to, work.batch_head, head, work.last, num_columns).rows(work.first, work.last);
    gradient.each(part, [&](auto& sums, int panel, int first_key) {
      if (to.is_accumulator) write_accumulators(float32_rows, sums, first_key, 64 * panel);
      else store_packed(staging, sums, first_key, 64 * panel);
    });
  }

  // Write dK and dV of a tile after its last step, through the shared memory that held its K and V.
  static CUFLASH_DEVICE void write_gradients(const attention::Params& params, const attention::WorkTile& work,
                                             WarpgroupDk& dk, WarpgroupDv& dv, int part) {
    using namespace attention;
    const int kv_head = work.batch_head.head / params.shape.group_size;
    dk.each(part, [&](auto& sums, int, int) { sums.scale(params.shape.softmax_scale); });
    ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);  // both warpgroups have read K and V
    write_part(params.dk, work, kv_head, params.shape.head_dim, dk, k_smem, part);
    write_part(params.dv, work, kv_head, params.shape.value_dim, dv, v_smem, part);
    ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);
    const auto copy = [&](const Matrices& to, int num_columns, const tile::TmaBoxes& from) {
      if (to.is_accumulator) return;
      const auto all = matrix<Element>(to, work.batch_head, kv_head, work.last, num_columns);
      tile::copy<kNumConsumers * kWarpgroupThreads>(all.rows(work.first, work.last), from,
                                                    threadIdx.x - kWarpgroupThreads);
    };
    copy(params.dk, params.shape.head_dim, tile::TmaBoxes(k_smem));
    copy(params.dv, params.shape.value_dim, tile::TmaBoxes(v_smem));
    ptx::fence_proxy_async();  // bulk copies of the next tile may overwrite the data that were read here
    release_kv();
  }

  // Run a consumer warpgroup: process all steps, tile after tile. The tensor cores always have one more product queued
  // than the one that is waited for: P is computed during the product dP, dS during dV, and dQ is added during dK and
  // the next scores.
  static CUFLASH_DEVICE void consume(const attention::Params& params, int part) {
    using namespace attention;
    SharedStorage& smem = shared();
    PipelineState state;
    int flags = wait_step(state);
    if (flags == StepMessage::kEndOfWork) return;
    wait_kv(flags);
    WarpgroupDk dk;
    WarpgroupDv dv;
    const auto clear = [](auto& sums, int, int) { sums.fill(0); };
    dk.each(part, clear);
    dv.each(part, clear);
    Scores s, dp;
    start_s(s, state, part);
    start_dp(dp, state, part);
    for (bool is_odd = false;; is_odd = !is_odd) {
      const StageQueries& queries = smem.queries[state.stage];
      const StepMessage& message = smem.messages[state.stage];
      const bool is_plain = !(flags & StepMessage::kMasked);
      tile::wait_wgmma<1>(s);
      if (is_plain) make_p<false>(s, queries, smem.softmax_scale_log2, part);
      else make_p<true>(s, queries, smem.softmax_scale_log2, part);
      publish_scores(p_smem(is_odd), s, part);
      dv.start_first_sum(do_smem(do_stage(state)), p_smem(is_odd), part);
      dv.start_other_sums(do_smem(do_stage(state)), p_smem(is_odd), part);
      tile::wait_wgmma<1 + WarpgroupDv::kOtherGemms>(dp);
      if (is_plain) make_ds<false>(s, dp, queries, part);
      else make_ds<true>(s, dp, queries, part);
      publish_scores(ds_smem, dp, part);
      const DqSumLayout dq_sum(message.dq_sum);
      DqSlice dq;
      start_dq(dq, part, 0);
      dk.start_first_sum(q_smem(state.stage), recomputed(ds_smem), part);
      tile::wait_wgmma<1>(dq);
      dv.fence_registers();
      // otherwise dO is released together with Q
      if constexpr (kReleasesDo) tile::arrive(smem.d_o[do_stage(state)].empty);
      if constexpr (kDqSlices == 2) {
        dq_sum.atomic_add(dq);
        start_dq(dq, part, 1);
      }
      dk.start_other_sums(q_smem(state.stage), recomputed(ds_smem), part);
      if constexpr (kDqSlices == 2) tile::wait_wgmma<WarpgroupDk::kOtherGemms>(dq);
      else dq_sum.atomic_add(dq);
      const PipelineState next_state = state.next();
      flags = wait_step(next_state);
      wait_next_head_k(flags);
      if (starts_next_tile(flags)) {
        ptx::wgmma_wait<0>();
        dk.fence_registers();
        if constexpr (kDqSlices == 2) dq_sum.atomic_add(dq, DqSlice::kColumnTiles);
        write_gradients(params, smem.works[message.work].tile, dk, dv, part);
        if (flags == StepMessage::kEndOfWork) return;
        dk.each(part, clear);
        dv.each(part, clear);
        wait_kv(flags);
        start_s(s, next_state, part);
      } else {
        start_s(s, next_state, part);
        if constexpr (kDqSlices == 2) dq_sum.atomic_add(dq, DqSlice::kColumnTiles);
        ptx::wgmma_wait<1>();
        dk.fence_registers();
      }
      tile::arrive(smem.q[state.stage].empty);
      start_dp(dp, next_state, part);
      state = next_state;
    }
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps,
                                 const QueryState& query_state, const score::Function& score_function,
                                 StagedMapArgument staged_map) {
    run_roles(params, maps, query_state, [&](int part) { consume(params, part); }, score_function, staged_map,
              chosen);
  }
};

constexpr int kSharedBytes = BackwardWide::kSharedBytes;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::BackwardWide::kThreads, cuflash::Config::kMinBlocks)
sm90_backward_wide(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::sm90::TensorMaps maps,
                   const __grid_constant__ cuflash::sm90::QueryState query_state) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  BackwardWide::run(params, maps, query_state, score_function, staged_map);
}
