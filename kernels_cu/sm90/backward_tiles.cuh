#pragma once
#include <sm90/q_pipeline.cuh>

// Register tiles of sm90_backward, whose rows of scores are keys, and how threads read the statistics and masks of a step's
// queries.
namespace cuflash {

static_assert(!kIsWide && kBlockKv == 64 * kNumConsumers, "a warpgroup has 64 keys");

// Rows are keys.
using Scores = tile::WarpTile<1, kBlockQ / 8, 4 * kNumConsumers>;
using WarpDk = tile::WarpTile<1, kHeadDim / 8, 4 * kNumConsumers>;
using WarpDv = tile::WarpTile<1, kValueDim / 8, 4 * kNumConsumers>;
using PackedScores = tile::PackedOperand<Element, Scores>;  // P or dS
using SmemDs = tile::WgmmaTile<Element, kBlockQ, kBlockKv>;
constexpr SmemDs ds_smem{kScoreOffset};  // if dQ is made

// What a warpgroup makes of dQ: of 64 queries all columns, or of all queries 64 columns at most.
constexpr int kRowParts = kBlockQ / 64;
// Of 64 queries registers have room for the scores and dP of the step after too: P is made while dP is.
constexpr bool kDpRunsAhead = kRowParts == 1;
using KOfWarpgroup = tile::WgmmaTile<Element, kBlockKv, kHeadDim * kRowParts / kNumConsumers>;

// A step's queries as a thread asks about them, from its first one on.
struct StepQueries {
  const StageQueries& stage;
  int first_query, flags;

  CUFLASH_DEVICE bool is_plain() const { return !(flags & (StepMessage::kMasked | StepMessage::kLargeLse)); }
  CUFLASH_DEVICE const float* lse_2() const { return stage.stats.lse_2 + first_query; }
  CUFLASH_DEVICE const float* delta() const { return stage.stats.delta + first_query; }
};

// Which elements of scores count: all, or, of a masked step, bits of the thread's keys, a word each 32 queries.
template <bool IsPlain>
struct ThreadMask {
  explicit CUFLASH_DEVICE ThreadMask(const StepQueries&) {}
  CUFLASH_DEVICE bool at(int, int) const { return true; }
};
template <>
struct ThreadMask<false> {
  uint32_t bits[Scores::kRows][kQueryWords];  // of the thread's first query on

  ThreadMask() = default;
  explicit CUFLASH_DEVICE ThreadMask(const StepQueries& queries) {
    const uint32_t all = queries.flags & StepMessage::kMasked ? 0 : ~0u;  // where an lse is large, but nothing hidden
    const uint32_t(*const row_masks)[kQueryWords] = &queries.stage.row_masks[Scores::first_row()];
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
      for (int x = 0; x < kQueryWords; ++x) bits[i][x] = (row_masks[Scores::row(i)][x] | all) >> queries.first_query;
  }
  CUFLASH_DEVICE bool at(int i, int j) const {
    return bits[i][Scores::column(j) / 32] >> Scores::column(j) % 32 & 1;
  }
};

// What is known of the thread's queries: of as many as registers are free for at once, so that products which start
// meanwhile do not hold it up.
struct QueryValues {
  static constexpr int kPrefetched = 1024 / kBlockQ;
  static_assert(kPrefetched <= Scores::kColumns, "some, or all");
  const float* from;
  float first[kPrefetched];

  QueryValues() = default;
  explicit CUFLASH_DEVICE QueryValues(const float* from) : from(from) {
#pragma unroll
    for (int j = 0; j < kPrefetched; ++j) first[j] = from[Scores::column(j)];
  }
  CUFLASH_DEVICE float at(int j) const { return j < kPrefetched ? first[j % kPrefetched] : from[Scores::column(j)]; }
};

}  // namespace cuflash
