#pragma once
#include <attention/column_parts.cuh>
#include <sm90/backward_changed_scores.cuh>

// Results of sm90_backward: dQ of a step, which is computed and then staged for the dQ writer or finished; and dK and
// dV of a tile.
namespace cuflash::sm90 {

template <class Config>
struct BackwardEpilogue : BackwardChangedScores<Config> {
  using Base = BackwardChangedScores<Config>;
  using typename Base::ChosenArgument, typename Base::DqSumLayout, typename Base::DropoutArgument, typename Base::Element, typename Base::KOfWarpgroup,
      typename Base::Listed, typename Base::SmemDs, typename Base::StepMessage, typename Base::WarpDk,
      typename Base::WarpDq, typename Base::WarpDv;
  using Base::ds_smem, Base::kBlockQ, Base::kBlockKv, Base::kMakesDq, Base::kNumConsumers, Base::kPacksQueries, Base::kRowParts, Base::k_smem, Base::shared,
      Base::write_gradient;

  // Start the product dQ of a step; each warpgroup computes a part of it. Called by both warpgroups, once they have
  // stored dS of their keys.
  static CUFLASH_DEVICE void start_dq(WarpDq& dq, int part) {
    ptx::fence_proxy_async();
    ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);  // both warpgroups have stored dS
    const KOfWarpgroup k_part{k_smem.start + (kRowParts == 1 ? part * KOfWarpgroup::kBytes : 0)};
    tile::start_gemm_nn(dq, tile::KMajor<SmemDs>(ds_smem, kRowParts == 1 ? 0 : 64 * part),
                        tile::MnMajor<KOfWarpgroup>(k_part));
  }

  // Wait until the other warpgroup has read this warpgroup's dS. The second function signals that this warpgroup has
  // read the other's dS.
  static CUFLASH_DEVICE void wait_ds(int part) {
    if constexpr (kMakesDq) ptx::bar_sync(kDsEmpty + part, kNumConsumers * kWarpgroupThreads);
  }
  static CUFLASH_DEVICE void release_ds(int part) {
    if constexpr (kMakesDq) ptx::bar_arrive(kDsEmpty + (1 - part), kNumConsumers * kWarpgroupThreads);
  }

  // Wait until the staging buffer of dQ is free, or holds the sums of other tiles. The second function stages dQ for
  // the dQ writer.
  static CUFLASH_DEVICE void wait_dq(int part) { ptx::bar_sync(kDqEmpty + part, kWarpgroupThreads + 32); }
  static CUFLASH_DEVICE void stage_dq(const WarpDq& dq, float* staged, int part) {
    DqSumLayout::store_shared(staged, dq);
    ptx::bar_arrive(kDqFull + part, kWarpgroupThreads + 32);
  }
  // Scale and store dQ of all queries of a step, with the staged sums of other tiles added if `adds`. Four groups of
  // eight columns are converted at a time, to save registers.
  static CUFLASH_DEVICE void finish_dq(const attention::Params& params, WarpDq& dq, const float* staged,
                                       const StepMessage& message, int part, bool adds) {
    const attention::BatchHead& batch_head = shared().works[message.work].tile.batch_head;
    const auto all = attention::matrix<Element>(params.dq, batch_head, batch_head.head, params.shape.seqlen_q,
                                                params.shape.head_dim);
    const auto rows = all.rows(message.block.start, Config::kCutsSequences ? message.block.stop
                                                                           : attention::query_tile_end<Listed>(
                                                                                 params, message.block.start, kBlockQ));
    const float scale = static_cast<float>(params.shape.softmax_scale);
#pragma unroll
    for (int first = 0; first < WarpDq::kColumnTiles; first += 4) {
      if (adds) DqSumLayout::add_shared(staged, dq, first, 4);
      tile::store_full_rows(rows, dq, first, scale);
    }
    ptx::bar_arrive(kDqFull + part, kWarpgroupThreads + 32);
  }

  // Return whether dk and dv are the sums over all queries, to which several thread blocks may contribute parts.
  static CUFLASH_DEVICE bool add_parts(const attention::Params&, attention::NoChosenLists, int, WarpDk&,
                                       WarpDv&) {
    return true;
  }
  static CUFLASH_DEVICE bool add_parts(const attention::Params& params, const attention::ChosenLists& chosen,
                                       int work_slot, WarpDk& dk, WarpDv& dv) {
    const attention::WorkTile& work = shared().works[work_slot].tile;
    const attention::Column column(params, chosen, work, shared().parts[work_slot].number, kBlockKv);
    const attention::SumThreads threads{kWarpgroupThreads, static_cast<int>(threadIdx.x) - kWarpgroupThreads};
    return attention::add_parts<kBlockKv>(params, chosen, work, column, dk, dv, shared().is_last_part, threads,
                                          [] { ptx::bar_sync(kConsumersSync, kWarpgroupThreads); });
  }

  // Write dK and dV of a tile, after its last step.
  static CUFLASH_DEVICE void write_gradients(const attention::Params& params, int work_slot, WarpDk& dk,
                                             WarpDv& dv, DropoutArgument dropout, ChosenArgument chosen) {
    if (!add_parts(params, chosen, work_slot, dk, dv)) return;
    const attention::WorkTile& work = shared().works[work_slot].tile;
    const int kv_head = work.batch_head.head / params.shape.group_size;
    dk.scale(params.shape.softmax_scale);
    if constexpr (Config::kHasDropout) dv.scale(dropout.single_factor);
    write_gradient(params.dk, work, kv_head, params.shape.head_dim, dk);
    write_gradient(params.dv, work, kv_head, params.shape.value_dim, dv);
  }
};

}  // namespace cuflash::sm90
