#pragma once
#include <sm90/q_pipeline.cuh>

// Register tiles of sm90_backward, in which the rows of score tiles are keys, and access to the statistics and masks of
// a step's queries.
namespace cuflash::sm90 {

template <class Config>
struct BackwardTiles : QPipeline<Config> {
  using Base = QPipeline<Config>;
  using typename Base::Element, typename Base::StageQueries, typename Base::StepMessage;
  using Base::kBlockKv, Base::kBlockQ, Base::kHeadDim, Base::kIsWide, Base::kNumConsumers, Base::kQueryWords,
      Base::kScoreOffset, Base::kValueDim;

  static_assert(!kIsWide && kBlockKv == 64 * kNumConsumers, "a warpgroup has 64 keys");

  using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kNumConsumers>;
  using WarpDk = tile::WarpTile<1, kHeadDim / 8, 4 * kNumConsumers>;
  using WarpDv = tile::WarpTile<1, kValueDim / 8, 4 * kNumConsumers>;
  using PackedScores = tile::PackedOperand<Element, Scores>;  // P or dS
  using SmemDs = tile::WgmmaTile<Element, kBlockQ, kBlockKv>;
  static constexpr SmemDs ds_smem{kScoreOffset};  // exists if this kernel computes dQ

  // The part of dQ that a warpgroup computes: all columns if a step has 64 queries, half of the columns if it has 128.
  static constexpr int kRowParts = kBlockQ / 64;
  // With 64 queries per step, registers also hold S and dP of the next step: its P is computed while the tensor cores
  // compute its dP.
  static constexpr bool kDpRunsAhead = kRowParts == 1;
  using KOfWarpgroup = tile::WgmmaTile<Element, kBlockKv, kHeadDim * kRowParts / kNumConsumers>;

  // Statistics of a step's queries, from the thread's first query on.
  struct StepQueries {
    const StageQueries& stage;
    int first_query, flags;

    CUFLASH_DEVICE bool is_plain() const { return !(flags & (StepMessage::kMasked | StepMessage::kLargeLse)); }
    CUFLASH_DEVICE const float* lse_2() const { return stage.stats.lse_2 + first_query; }
    CUFLASH_DEVICE const float* delta() const { return stage.stats.delta + first_query; }
  };

  // Masks of a thread's scores. In a plain step, AllOfThread allows all scores. In other steps, MaskOfThread has a bit
  // for each query of each of the thread's keys, in words of 32 queries.
  struct AllOfThread {
    static constexpr bool kIsPlain = true;
    explicit CUFLASH_DEVICE AllOfThread(const StepQueries&) {}
    CUFLASH_DEVICE bool at(int, int) const { return true; }
  };
  struct MaskOfThread {
    static constexpr bool kIsPlain = false;
    uint32_t bits[Scores::kRows][kQueryWords];  // bit 0 belongs to the thread's first query

    MaskOfThread() = default;
    explicit CUFLASH_DEVICE MaskOfThread(const StepQueries& queries) {
      const uint32_t all = queries.flags & StepMessage::kMasked ? 0 : ~0u;  // a step with a large lse may need no mask
      const uint32_t(*const row_masks)[kQueryWords] = &queries.stage.row_masks[Scores::first_row()];
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
        for (int x = 0; x < kQueryWords; ++x) bits[i][x] = (row_masks[Scores::row(i)][x] | all) >> queries.first_query;
    }
    CUFLASH_DEVICE bool at(int i, int j) const { return bits[i][Scores::column(j) / 32] >> Scores::column(j) % 32 & 1; }
  };

  // Values (lse or delta) of the thread's queries. Some are loaded into registers in advance, so that products that
  // start meanwhile do not delay them; the others are loaded at use.
  struct QueryValues {
    static constexpr int kPrefetched = 1024 / kBlockQ;
    static_assert(kPrefetched <= Scores::kColumns, "a thread has no more queries");
    const float* from;
    float first[kPrefetched];

    QueryValues() = default;
    explicit CUFLASH_DEVICE QueryValues(const float* from) : from(from) {
#pragma unroll
      for (int j = 0; j < kPrefetched; ++j) first[j] = from[Scores::column(j)];
    }
    CUFLASH_DEVICE float at(int j) const { return j < kPrefetched ? first[j % kPrefetched] : from[Scores::column(j)]; }
  };
};

}  // namespace cuflash::sm90
