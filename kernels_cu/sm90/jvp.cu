// The tangents of o and lse on Hopper, up to 128 columns, from o and lse that the forward pass wrote. A tile has 64
// queries for each consumer warpgroup, and their tangents. One warpgroup of a thread block loads Q, K, V and their
// tangents; the others multiply. S, S_dot and O_dot stay in registers, and one warpgroup multiplies while another
// computes weights. Results are bitwise reproducible.
// score_gradient_mma.cuh is included first, since the `probability` with the approximate exponential must be declared
// before it is used.
#include <attention/score_gradient_mma.cuh>
#include <attention/tangent_weights.cuh>
#include <sm90/tangent_pipeline.cuh>

namespace cuflash::sm90 {

struct Jvp : TangentPipeline<Config> {
  using Output = tile::WarpTile<1, kValueDim / 8, 4 * kNumConsumers>;
  using Weights = tile::PackedOperand<Element, Scores>;
  using Rows = attention::RowTangents<float, Scores::kRows>;
  using Result = attention::RowResult<float>;

  // Return a function from a thread's row of a tile to its result, from the sum of w over all keys.
  static CUFLASH_DEVICE Result result_of(const attention::Params& params, const attention::Tangents& tangents,
                                         SinkArgument sink, const attention::WorkTile& work, int row, float sum,
                                         float center, bool has_key) {
    const int head = work.batch_head.head;
    const auto lse = attention::matrix<float>(params.lse, work.batch_head, head, work.last, 1);
    const int query = work.first + row;
    const float of_row = query < work.last ? lse.at(query, 0) : 0.0f;
    return attention::row_result(sum, center, has_key, of_row, sink, tangents, work.batch_head, head);
  }

  struct JvpHooks {
    // Write the tangents of queries that see no key. Called by a warp.
    static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                                SinkArgument sink, const attention::Tangents& tangents) {
      using namespace attention;
      const int head = work.batch_head.head, num_columns = params.shape.value_dim;
      const auto o_dot = matrix<Element>(tangents.o_dot, work.batch_head, head, work.last, num_columns);
      const auto lse_dot = matrix<float>(tangents.lse_dot, work.batch_head, head, work.last, 1);
#pragma unroll 1
      for (int row = work.first; row < work.last; ++row) {
        const Result result = result_of(params, tangents, sink, work, row - work.first, 0, 0, false);
        if (is_first_lane()) lse_dot.at(row, 0) = result.lse_dot;
        Element empty = {};
        tile::to_element(result.o_dot(0, 0), empty);
#pragma unroll 1
        for (int column = ptx::lane(); column < num_columns; column += 32) o_dot.at(row, column) = empty;
      }
    }
  };

  // Turn the scores of a step into weights, and their tangents into those of weights.
  static CUFLASH_DEVICE void update(const attention::Params& params, Scores& s, Scores& s_dot, Rows& rows, int flags,
                                    const WorkTileInfo& tile_info, const StepMessage& message, ChosenArgument chosen) {
    using namespace attention;
    const auto row_sum = [](float x) { return tile::quad_sum(x); };
    const float scale_log2 = shared().softmax_scale_log2, scale = params.shape.softmax_scale;
    if (flags & StepMessage::kUnmasked) {
      weights_and_tangents<false>(s, s_dot, rows, scale_log2, scale, [](int, int) { return true; }, row_sum);
    } else {
      mask_block(params, s, tile_info, message, chosen);
      weights_and_tangents<true>(s, s_dot, rows, scale_log2, scale,
                                 [&](int i, int j) { return !is_masked_score(s.at(i, j)); }, row_sum);
    }
  }

  // Add the products of a step's weights with V and its tangent, once these have arrived.
  static CUFLASH_DEVICE void add_values(Output& o_dot, const Weights& w, const Weights& p, int stage, int phase) {
    using V = tile::MnMajor<SmemV>;
    tile::wait_full(shared().v[stage], phase);
    if constexpr (attention::kMovesScores) tile::start_gemm_add_nn(o_dot, w, V(v_smem(stage)));
    if constexpr (Config::kHasVDot) tile::start_gemm_add_nn(o_dot, p, V(v_dot_smem(stage)));
    tile::wait_wgmma<0>(o_dot);
    tile::arrive(shared().v[stage].empty);
  }

  // Add all keys of a tile to the results of a warpgroup. Q is released after the last product with it.
  static CUFLASH_DEVICE void process_tile(const attention::Params& params, int group, Rows& rows, Output& o_dot,
                                          const WorkTileInfo& tile_info, unsigned& num_blocks, ChosenArgument chosen) {
    SharedStorage& smem = shared();
    visit_steps(group, num_blocks, [&](int stage, int phase, int flags) {
      Scores s, s_dot;
      start_scores(s, s_dot, group, stage);
      tile::wait_wgmma<0>(s);
      if constexpr (attention::kMovesScores) ptx::fence_registers(tile::accumulators(s_dot));
      if (flags & StepMessage::kLastForWarpgroup) tile::arrive(smem.q[0].empty);
      update(params, s, s_dot, rows, flags, tile_info, smem.messages[stage], chosen);
      tile::arrive(smem.k[stage].empty);
      Weights w, p;
      if constexpr (attention::kMovesScores) w = s_dot;
      if constexpr (Config::kHasVDot) p = s;
      add_values(o_dot, w, p, stage, phase);
    });
  }

  // Write lse_dot and O_dot of a warpgroup's queries.
  static CUFLASH_DEVICE void write_results(const attention::Params& params, const attention::Tangents& tangents,
                                           SinkArgument sink, const attention::WorkTile& work, const Rows& rows,
                                           Output& o_dot) {
    using namespace attention;
    const auto of_tile = [&](auto element, const Matrices& x, int columns) {
      return matrix<decltype(element)>(x, work.batch_head, work.batch_head.head, work.last, columns)
          .rows(work.first, work.last);
    };
    const int num_columns = params.shape.value_dim;
    const auto o = of_tile(Element{}, params.o, num_columns);
    const auto lse_dot = of_tile(0.0f, tangents.lse_dot, 1);
#pragma unroll
    for (int i = 0; i < Output::kRows; ++i) {
      const int row = Output::first_row() + Output::row(i);
      const bool in_bounds = row < lse_dot.num_rows;
      const Result result = result_of(params, tangents, sink, work, row, tile::quad_sum(rows.sum[i]), rows.center[i],
                                      rows.has_key >> i & 1);
#pragma unroll
      for (int j = 0; j < Output::kColumns; ++j) {
        const int column = Output::first_column() + Output::column(j);
        const bool is_read = (kMovesScores || Config::kHasSinkDot) && in_bounds && column < num_columns;
        o_dot.at(i, j) = result.o_dot(o_dot.at(i, j), is_read ? ptx::to_float(o.at(row, column)) : 0.0f);
      }
      if (Output::first_column() == 0 && in_bounds) lse_dot.at(row, 0) = result.lse_dot;
    }
    tile::store(of_tile(Element{}, tangents.o_dot, num_columns), o_dot);
  }

  // Run a consumer warpgroup.
  static CUFLASH_DEVICE void consume(const attention::Params& params, const attention::Tangents& tangents, int group,
                                     SinkArgument sink, ChosenArgument chosen) {
    unsigned num_blocks = 0;
    for (unsigned num_tiles_done = 0; wait_tile(num_tiles_done); ++num_tiles_done) {
      const WorkTileInfo& tile_info = shared().tile_infos[tile_info_index(num_tiles_done)];
      const attention::WorkTile work = tile_info.work;
      const auto lse = attention::matrix<float>(params.lse, work.batch_head, work.batch_head.head, work.last, 1);
      Rows rows(lse.rows(work.first, work.last), [](int i) { return Scores::first_row() + Scores::row(i); });
      Output o_dot;
      o_dot.fill(0);
      process_tile(params, group, rows, o_dot, tile_info, num_blocks, chosen);
      write_results(params, tangents, sink, work, rows, o_dot);
    }
  }
};

constexpr int kSharedBytes = Jvp::kArraysEnd;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::Jvp::kThreads, cuflash::Config::kMinBlocks)
sm90_jvp(const __grid_constant__ cuflash::attention::Params params,
         const __grid_constant__ cuflash::sm90::TensorMaps maps,
         const __grid_constant__ cuflash::sm90::TensorMaps dot_maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  Jvp::run_roles<Jvp::JvpHooks>(params, maps, dot_maps, tangents, sink, pages, scales, score_function, staged_map, chosen,
                                [&](int group) { Jvp::consume(params, tangents, group, sink, chosen); });
}
