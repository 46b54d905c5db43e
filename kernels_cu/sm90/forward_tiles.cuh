#pragma once
#include <attention/mask_softmax_mma.cuh>
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <sm90/ping_pong.cuh>

// Definitions that sm90_forward and sm90_forward_fp8 share: register tiles of a consumer warpgroup, operands of the
// product for scores, masks, and the store of lse. In both kernels, num_tiles_done and num_k_blocks count the tiles and
// the blocks of keys that a warpgroup has read.
namespace cuflash::sm90 {

template <class Config>
struct ForwardTiles : PingPong<Config> {
  using Base = PingPong<Config>;
  using typename Base::ChosenArgument, typename Base::SmemK, typename Base::SmemQ, typename Base::StepMessage;
  using typename Base::SinkArgument;
  using Base::kBlockKv, Base::kMinBlocks, Base::kNumConsumers, Base::kValueDim, Base::mask_block, Base::q_smem,
      Base::q_stage_of, Base::shared, Base::stage_of, Base::tile_info_index;

  static constexpr bool kReallocatesRegisters = kNumConsumers > 1 || kMinBlocks > 1;

  using Scores = tile::WarpTile<1, kBlockKv / 8, 4 * kNumConsumers>;
  using Output = tile::WarpTile<1, kValueDim / 8, 4 * kNumConsumers>;

  using QOperand = tile::KMajor<SmemQ>;
  using KOperand = tile::KMajor<SmemK>;
  static CUFLASH_DEVICE QOperand q_operand(int group, unsigned num_tiles_done) {
    return QOperand(q_smem(q_stage_of(num_tiles_done)), 64 * (group % kNumConsumers));
  }

  // Set masked scores to -inf, and negate scores if the scale is not positive.
  static CUFLASH_DEVICE void negate_and_mask(const attention::Params& params, Scores& s, unsigned num_tiles_done,
                                             unsigned num_k_blocks, ChosenArgument chosen) {
    using Signs = attention::LazySoftmax<Scores::kRows>;
    const StepMessage& message = shared().messages[stage_of(num_k_blocks)];
    const double softmax_scale = attention::exponent_scale(params.shape);
    if (Signs::needs_negation(softmax_scale)) Signs::negate(s, softmax_scale);
    mask_block(params, s, shared().tile_infos[tile_info_index(num_tiles_done)], message, chosen);
  }

  // Merge the rows of O and lse with the sinks of their heads, if the kernel has sinks.
  template <class LogitOf>
  static CUFLASH_DEVICE void merge_sink_into(Output& o, float (&row_lse)[Output::kRows], LogitOf logit_of) {
    if constexpr (Config::kHasSink)
#pragma unroll
      for (int i = 0; i < o.kRows; ++i)
        o.scale_row(i, attention::merge_sink(row_lse[i], logit_of(o.first_row() + o.row(i))));
  }

  // Return a function that returns the sink's logit for a thread's row, which depends on the row's head.
  static CUFLASH_DEVICE auto sink_of_rows(SinkArgument sink, const attention::WorkTile& work,
                                          attention::NoChosenLists) {
    const float logit = attention::sink_logit<float>(sink, work.batch_head, work.batch_head.head);
    return [logit](int) { return logit; };
  }
  static CUFLASH_DEVICE auto sink_of_rows(SinkArgument sink, const attention::WorkTile& work,
                                          const attention::ChosenLists& chosen) {
    return [&](int row) {
      const int head = attention::head_and_query_of_neighbours(chosen, work, row).head;
      return attention::sink_logit<float>(sink, work.batch_head, head);
    };
  }

  // Store lse of a thread's rows. Of the threads that share a row, the one with its first column stores it. The second
  // function does this for rows that belong to several heads.
  static CUFLASH_DEVICE void store_lse(const attention::Params& params, const EpilogueTarget& target, const Output& o,
                                       const float (&row_lse)[Output::kRows]) {
#pragma unroll
    for (int i = 0; i < o.kRows; ++i) {
      const int row = o.first_row() + o.row(i);
      if (o.first_column() == 0 && row < target.num_rows) target.lse[row * params.lse.row_stride] = row_lse[i];
    }
  }
  static CUFLASH_DEVICE void store_lse(const tile::StackedRows<float>& lse, const Output& o,
                                       const float (&row_lse)[Output::kRows]) {
#pragma unroll
    for (int i = 0; i < o.kRows; ++i) {
      const int row = o.first_row() + o.row(i);
      if (o.first_column() == 0 && row < lse.num_rows) lse.at(row, 0) = row_lse[i];
    }
  }
};

}  // namespace cuflash::sm90
