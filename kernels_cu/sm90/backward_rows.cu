// dQ of a backward pass on Hopper, up to 128 columns, for calls whose dQ must be bitwise reproducible and for lists of
// small blocks: the loop of FlashAttention-2 (arXiv 2307.08691, algorithm 2) with the products of FlashAttention-3
// (arXiv 2407.08608). A tile has 64 queries, and P is recomputed from lse. One warpgroup of a thread block loads Q and
// dO, and K and V of each step; the other one multiplies. P, dS and dQ stay in registers. While one thread block
// computes P and dS, another one on the same multiprocessor multiplies. If queries choose their blocks, a tile has
// neighboring queries with all heads that share their lists (packs_queries).
#include <attention/score_gradient_mma.cuh>
#include <sm90/query_stats.cuh>
#include <sm90/kv_pipeline.cuh>

namespace cuflash::sm90 {

struct BackwardRows : KvPipeline<Config> {
  using QueryTiles = QueryTileStats<Config>;
  using QueryStats = QueryTiles::QueryStats;
  // a block starts with 128 registers per thread
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 200;
  static_assert(kProducerRegisters + kConsumerRegisters <= 2 * 128, "a block has no more registers");
  static_assert(kNumConsumers == 1 && kThreads == 2 * kWarpgroupThreads, "a warpgroup multiplies 64 queries");

  using Scores = tile::WarpTile<1, kBlockKv / 8, 4>;
  using Dq = tile::WarpTile<1, kHeadDim / 8, 4>;
  using PackedDs = tile::PackedOperand<Element, Scores>;  // dS
  using Statistics = attention::RowStatistics<Scores>;

  struct BackwardRowsHooks {
    // Write dq = 0 for queries that see no key. Called by a warp.
    static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                                SinkArgument, attention::NoChosenLists) {
      QueryTiles::clear_rows(params.dq, work, work.batch_head.head, params.shape.head_dim);
    }
    static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                                SinkArgument, const attention::ChosenLists& chosen) {
      using namespace attention;
      const int num_columns = params.shape.head_dim;
      if (params.dq.is_accumulator) tile::clear(rows_of_tile<float>(chosen, params.dq, work, num_columns));
      else tile::clear(rows_of_tile<Element>(chosen, params.dq, work, num_columns));
    }
  };

  // Return lse and delta of a thread's rows. The previous kernel has stored them by tiles of queries. Without a list,
  // that kernel cuts tiles from the first query on, whereas this kernel cuts them from the last query on.
  static CUFLASH_DEVICE Statistics row_statistics(const attention::Params& params, const QueryState& query_state,
                                                  const attention::WorkTile& work, attention::NoChosenLists) {
    const auto* const all = QueryTiles::query_records(query_state, work.batch_head);
    Statistics stats;
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const int query = work.first + Scores::first_row() + Scores::row(i);
      const int first = Config::kIsListed ? work.first : query / kBlockQ * kBlockQ;
      const bool in_bounds = query < work.last;
      const QueryStats& query_stats_of_tile =
          all[in_bounds ? attention::query_tile_number<Listed>(params, first, kBlockQ) : 0].stats;
      stats.lse_2[i] = in_bounds ? query_stats_of_tile.lse_2[query - first] : -ptx::negative_infinity<float>();
      stats.delta[i] = in_bounds ? query_stats_of_tile.delta[query - first] : 0;
    }
    return stats;
  }

  // Return lse and delta of a thread's rows of neighboring queries.
  static CUFLASH_DEVICE Statistics row_statistics(const attention::Params& params, const QueryState&,
                                                  const attention::WorkTile& work,
                                                  const attention::ChosenLists& chosen) {
    return attention::row_statistics<Scores>(attention::rows_of_tile<float>(chosen, params.lse, work, 1),
                                             attention::rows_of_tile<float>(chosen, params.delta, work, 1));
  }

  // Replace q k^T by P; masked scores stay marked.
  template <bool IsPlain>
  static CUFLASH_DEVICE void make_p(Scores& s, const Statistics& stats, float softmax_scale_log2) {
    attention::for_each_score<Scores>([&](int i, int j) {
      const float p = attention::probability(s.at(i, j), softmax_scale_log2, stats.lse_2[i]);
      s.at(i, j) = IsPlain || !attention::is_masked_score(s.at(i, j)) ? p : s.at(i, j);
    });
  }

  // Replace dP by dS. Masked elements have an arbitrary dP, and their dS is 0.
  template <bool IsPlain>
  static CUFLASH_DEVICE void make_ds(Scores& p, Scores& dp, const Statistics& stats) {
    attention::for_each_score<Scores>([&](int i, int j) {
      const float ds = attention::score_gradient(p.at(i, j), dp.at(i, j), stats.delta[i]);
      dp.at(i, j) = IsPlain || !attention::is_masked_score(p.at(i, j)) ? ds : 0.0f;
    });
  }

  // Start the product for a step's scores once K has arrived; the second function starts dP once V has arrived.
  // `num_k_blocks` counts the blocks of keys that the warpgroup has read.
  static CUFLASH_DEVICE void start_scores(Scores& s, unsigned num_k_blocks) {
    const int stage = stage_of(num_k_blocks);
    tile::wait_full(shared().k[stage], phase_of(num_k_blocks));
    tile::start_gemm_nt(s, tile::KMajor<SmemQ>(q_smem(0)), tile::KMajor<SmemK>(k_smem(stage)));
  }
  static CUFLASH_DEVICE void start_dp(Scores& dp, unsigned num_k_blocks) {
    const int stage = stage_of(num_k_blocks);
    tile::wait_full(shared().v[stage], phase_of(num_k_blocks));
    tile::start_gemm_nt(dp, tile::KMajor<SmemDo>(do_smem(0)), tile::KMajor<SmemV>(v_smem(stage)));
  }

  // Add all keys of a tile to its dQ. The products for scores and dP of the next step are queued after the product dQ
  // of this step, and P is computed during the product dP. Q and dO are released after the last dP, so that those of
  // the next tile are loaded while the results are written.
  static CUFLASH_DEVICE void process_tile(const attention::Params& params, const QueryState& query_state, Dq& dq,
                                          const WorkTileInfo& tile_info, unsigned& num_k_blocks,
                                          ChosenArgument chosen) {
    SharedStorage& smem = shared();
    Scores s, dp;
    start_scores(s, num_k_blocks);
    start_dp(dp, num_k_blocks);
    // loaded while the products run
    const Statistics stats = row_statistics(params, query_state, tile_info.work, chosen);
    tile::wait_wgmma<1>(s);
    while (true) {
      const int stage = stage_of(num_k_blocks), flags = flags_of_warpgroup(0, num_k_blocks);
      const bool is_plain = flags & StepMessage::kUnmasked, has_member = !(flags & StepMessage::kNoMember);
      if (is_plain) {
        make_p<true>(s, stats, smem.softmax_scale_log2);
      } else if (!kPacksQueries || has_member) {
        mask_block(params, s, tile_info, smem.messages[stage], chosen);
        make_p<false>(s, stats, smem.softmax_scale_log2);
      }
      tile::wait_wgmma<0>(dp);
      tile::arrive(smem.v[stage].empty);
      if (is_plain) make_ds<true>(s, dp, stats);
      else if (!kPacksQueries || has_member) make_ds<false>(s, dp, stats);
      PackedDs ds;
      ds = dp;
      if (kPacksQueries && !has_member) ds.clear();
      tile::start_gemm_add_nn(dq, ds, tile::MnMajor<SmemK>(k_smem(stage)));
      ++num_k_blocks;
      if (flags & StepMessage::kLastOfTile) break;
      start_scores(s, num_k_blocks);
      start_dp(dp, num_k_blocks);
      tile::wait_wgmma<1>(s);
      ptx::fence_registers(tile::accumulators(dq));
      tile::fence_registers(ds);
      tile::arrive(smem.k[stage].empty);
    }
    tile::arrive(smem.q[0].empty);
    tile::wait_wgmma<0>(dq);
    tile::arrive(smem.k[stage_of(num_k_blocks - 1)].empty);
  }

  // Write dQ of a tile.
  static CUFLASH_DEVICE void write_dq(const attention::Params& params, const attention::WorkTile& work, Dq& dq,
                                      attention::NoChosenLists) {
    QueryTiles::write_gradient(params.dq, work, work.batch_head.head, params.shape.head_dim, dq);
  }
  static CUFLASH_DEVICE void write_dq(const attention::Params& params, const attention::WorkTile& work, Dq& dq,
                                      const attention::ChosenLists& chosen) {
    const int num_columns = params.shape.head_dim;
    if (params.dq.is_accumulator)
      return attention::write_accumulators(attention::rows_of_tile<float>(chosen, params.dq, work, num_columns), dq);
    tile::store(attention::rows_of_tile<Element>(chosen, params.dq, work, num_columns), dq);
  }

  static CUFLASH_DEVICE void consume(const attention::Params& params, const QueryState& query_state,
                                     ChosenArgument chosen) {
    unsigned num_k_blocks = 0;
    for (unsigned num_tiles_done = 0; wait_tile(num_tiles_done); ++num_tiles_done) {
      const WorkTileInfo& tile_info = shared().tile_infos[tile_info_index(num_tiles_done)];
      Dq dq;
      dq.fill(0);
      process_tile(params, query_state, dq, tile_info, num_k_blocks, chosen);
      dq.scale(params.shape.softmax_scale);
      write_dq(params, tile_info.work, dq, chosen);
    }
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps, SinkArgument sink,
                                 PagesArgument pages, ScalesArgument scales, const score::Function& score_function,
                                 StagedMapArgument staged_map, const QueryState& query_state,
                                 ChosenArgument chosen) {
    if (threadIdx.x == 0) {
      init_barriers();
      shared().softmax_scale_log2 = params.shape.softmax_scale * attention::kLog2E;
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroupThreads) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      produce<BackwardRowsHooks>(params, maps, sink, pages, scales, score_function, staged_map, chosen);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(params, query_state, chosen);
    }
  }
};

constexpr int kSharedBytes = BackwardRows::kArraysEnd;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::BackwardRows::kThreads, cuflash::Config::kMinBlocks)
sm90_backward_rows(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::sm90::TensorMaps maps,
                   const __grid_constant__ cuflash::sm90::QueryState query_state CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  BackwardRows::run(params, maps, sink, pages, scales, score_function, staged_map, query_state, chosen);
}
