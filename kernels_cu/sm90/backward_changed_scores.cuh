#pragma once
#include <sm90/changed_weights.cuh>

// P and dS of a step of sm90_backward, in registers, in calls whose weights a score function or dropout changes.
namespace cuflash::sm90 {

template <class Config>
struct BackwardChangedScores : ChangedWeights<Config> {
  using Base = ChangedWeights<Config>;
  using typename Base::AllOfThread, typename Base::DropoutArgument, typename Base::MaskOfThread,
      typename Base::PackedScores, typename Base::QueryValues, typename Base::Scores, typename Base::SmemDs, typename Base::StepPositions,
      typename Base::StepQueries;
  using Base::kChangesWeights, Base::kDpRunsAhead, Base::kHasSlopes, Base::kMakesDq,
      Base::kMakesPAndDsTogether;

  using Kept = attention::KeptFragments<Scores, true>;
  template <class Score>
  using StepScoreOf = typename Base::template StepScoreIf<Scores, Score>;

  // P is computed while dP is multiplied, if slopes do not depend on scores and if registers can hold dP of the next
  // step.
  static constexpr bool kMakesPEarly = kChangesWeights && !kMakesPAndDsTogether && kDpRunsAhead;

  // Call visit(i, j) for a thread's elements in group `k` of 16 queries.
  template <class Visit>
  static CUFLASH_DEVICE void for_each_of_fragment(int k, Visit visit) {
    attention::for_each_score<Scores>(4 * k, 4 * (k + 1), visit);
  }

  // Replace q k^T by P for 16 queries; P is 0 for masked elements and for queries without a key. With a score function,
  // `scale` multiplies scores; without one, it multiplies exponents. `lse_2_of` returns the statistic of a column.
  template <class Step, class LseOf, class Mask>
  static CUFLASH_DEVICE void make_changed_p(Scores& s, const Step& step, int k, LseOf lse_2_of, const Mask& mask,
                                            float scale) {
    step.apply(s, k, scale);
    const float exponent_scale = kHasScore ? static_cast<float>(attention::kLog2E) : scale;
    for_each_of_fragment(k, [&](int i, int j) {
      const float lse_2 = lse_2_of(j);
      const float p = attention::unclamped_probability(attention::score_exponent(s.at(i, j), exponent_scale, lse_2));
      const bool is_seen = mask.at(i, j) && lse_2 != -ptx::negative_infinity<float>();
      s.at(i, j) = Mask::kIsPlain ? p : is_seen ? attention::clamp_probability(p) : 0.0f;
    });
  }

  // Replace q k^T by P for all queries of a step. P is computed as in a plain step, and then corrected if the step is
  // not plain. Thus all steps share the same code, which saves instruction fetches. `prefetched` has the statistics that
  // were loaded before products started, if registers can hold them.
  template <class Step>
  static CUFLASH_DEVICE void make_changed_p(Scores& s, const Step& step, const QueryValues& prefetched,
                                            const StepQueries& queries, float scale) {
    constexpr bool kPrefetchesLse = kHasScore && score::Function::kNumBins == 0;
    const AllOfThread all(queries);
    const auto lse_2 = [&](int j) { return kPrefetchesLse ? prefetched.at(j) : queries.lse_2()[Scores::column(j)]; };
#pragma unroll
    for (int k = 0; k < PackedScores::kNumFragments; ++k) make_changed_p(s, step, k, lse_2, all, scale);
    if (queries.is_plain()) return;
    Base::template clamp_and_mask<true>(s, queries);
#pragma unroll
    for (int k = 0; k < PackedScores::kNumFragments; ++k)
      for_each_of_fragment(k, [&](int i, int j) {
        if (queries.lse_2()[Scores::column(j)] == -ptx::negative_infinity<float>()) s.at(i, j) = 0;
      });
  }

  // Determine which weights of a step dropout keeps.
  static CUFLASH_DEVICE void draw_step(Kept& kept, const StepPositions& positions, DropoutArgument dropout,
                                       const attention::Shape& shape) {
    if constexpr (Config::kHasDropout) kept = Base::template kept_weights_of_step<Scores>(dropout, shape, positions);
  }

  // A tag that selects one of two versions of a function at compile time: for plain steps, or for all others.
  template <bool Value>
  struct IsPlain {
    static constexpr bool kValue = Value;
  };

  // Compute P and dS of a step from P (or q k^T) and dP, pack them as left operands of products, and store dS
  // transposed for the product dQ. The weights that dropout drops become 0 in P, for the product dV.
  template <bool IsPlain, class Score>
  static CUFLASH_DEVICE void make_changed_operands(Scores& s, Scores& dp, PackedScores& p, PackedScores& ds,
                                                   const Kept& kept, const StepQueries& queries,
                                                   const StepPositions& positions, const Score& score,
                                                   DropoutArgument dropout, float scale, uint32_t ds_address,
                                                   typename StepScoreOf<Score>::StepSums& of_steps) {
    using Step = StepScoreOf<Score>;
    const Step step(score, positions);
    typename Step::Sums sums;
    step.start_bins(of_steps);
    const tile::Conditional<IsPlain, AllOfThread, MaskOfThread> mask(queries);
    const auto lse_2 = [&](int j) { return queries.lse_2()[Scores::column(j)]; };
#pragma unroll
    for (int k = 0; k < PackedScores::kNumFragments; ++k) {
      if constexpr (Config::kHasDropout)
        for_each_of_fragment(
            k, [&](int i, int j) { dp.at(i, j) = (kept.at(i, j) ? dp.at(i, j) : 0.0f) * dropout.single_factor; });
      if constexpr (kMakesPAndDsTogether) {
        step.make_p_and_ds(
            s, dp, scale, [&](int i, int j) { return mask.at(i, j); }, lse_2,
            [&](int j) { return queries.delta()[Scores::column(j)]; }, k, sums);
      } else {
        if constexpr (!kMakesPEarly) make_changed_p(s, step, k, lse_2, mask, scale);
        for_each_of_fragment(k, [&](int i, int j) {
          const float delta = queries.delta()[Scores::column(j)];
          const float ds = attention::score_gradient(s.at(i, j), dp.at(i, j), delta);
          // 0 also for queries for which the score function hides all keys
          dp.at(i, j) = IsPlain || s.at(i, j) != 0 ? ds : 0.0f;
        });
        if constexpr (kHasSlopes) step.apply_slopes(s, dp, k, sums);
      }
      if constexpr (Config::kHasDropout)
        for_each_of_fragment(k, [&](int i, int j) { s.at(i, j) = kept.at(i, j) ? s.at(i, j) : 0.0f; });
      p.pack(s, k);
      ds.pack(dp, k);
      if constexpr (kMakesDq) tile::store_transposed<SmemDs>(ds_address, ds, k);
    }
    step.flush(sums, of_steps);
  }
};

}  // namespace cuflash::sm90
