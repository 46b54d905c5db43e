#pragma once
#include <attention/sink.cuh>
#include <sm90/kv_storage.cuh>

// Functions that the producer warps (sm90/kv_pipeline.cuh) of all forward kernels call for queries that see no key.
namespace cuflash::sm90 {

template <class Config>
struct ForwardHooks {
  using Element = typename Config::Element;

  // Write lse = -inf and o = 0, or their merge with the sink, for queries that see no key. Called by a warp.
  static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                              attention::SinkArgument<Config> sink, attention::NoChosenLists) {
    using namespace attention;
    const int length = params.shape.seqlen_q, num_columns = params.shape.value_dim;
    const auto lse = matrix<float>(params.lse, work.batch_head, work.batch_head.head, length, 1);
    const auto o = matrix<Element>(params.o, work.batch_head, work.batch_head.head, length, num_columns);
    float row_lse = ptx::negative_infinity<float>();
    Element zero = {};
    if (Config::kHasSink) {
      const float logit = sink_logit<float>(sink, work.batch_head, work.batch_head.head);
      tile::to_element(0 * merge_sink(row_lse, logit), zero);
    }
#pragma unroll 1
    for (int row = work.first; row < work.last; ++row) {
      if (is_first_lane()) lse.at(row, 0) = row_lse;
#pragma unroll 1
      for (int column = ptx::lane(); column < num_columns; column += 32) o.at(row, column) = zero;
    }
  }
  static CUFLASH_DEVICE void write_empty_rows(const attention::Params& params, const attention::WorkTile& work,
                                              attention::SinkArgument<Config> sink,
                                              const attention::ChosenLists& chosen) {
    using namespace attention;
    const auto lse = rows_of_tile<float>(chosen, params.lse, work, 1);
    const auto o = rows_of_tile<Element>(chosen, params.o, work, params.shape.value_dim);
#pragma unroll 1
    for (int row = 0; row < o.num_rows; ++row) {
      float of_row = ptx::negative_infinity<float>();
      Element empty = {};
      if constexpr (Config::kHasSink) {
        const int head = head_and_query_of_neighbours(chosen, work, row).head;
        tile::to_element(0 * merge_sink(of_row, sink_logit<float>(sink, work.batch_head, head)), empty);
      }
      if (is_first_lane()) *lse.row(row) = of_row;
#pragma unroll 1
      for (int column = ptx::lane(); column < params.shape.value_dim; column += 32) o.at(row, column) = empty;
    }
  }
};

}  // namespace cuflash::sm90
