#pragma once
#include <attention/for_each_score.cuh>
#include <attention/score_gradient_mma.cuh>
#include <sm90/backward_tiles.cuh>

// P and dS of a step of sm90_backward, in registers, in calls without a score function and dropout.
namespace cuflash::sm90 {

template <class Config>
struct BackwardScores : BackwardTiles<Config> {
  using Base = BackwardTiles<Config>;
  using Base::kMakesDq;
  using typename Base::AllOfThread, typename Base::MaskOfThread, typename Base::PackedScores,
      typename Base::QueryValues, typename Base::Scores, typename Base::SmemDs, typename Base::StepQueries;

  // Replace q k^T by P. In a plain step, P is not clamped to 1. delta is loaded once the registers of lse are free, and
  // arrives while exponentials are computed.
  template <bool IsPlain>
  static CUFLASH_DEVICE void make_p(Scores& s, const QueryValues& lse_2, QueryValues& delta, const StepQueries& queries,
                                    float softmax_scale_log2) {
    const tile::Conditional<IsPlain, AllOfThread, MaskOfThread> mask(queries);
    attention::for_each_score<Scores>(
        [&](int i, int j) { s.at(i, j) = attention::score_exponent(s.at(i, j), softmax_scale_log2, lse_2.at(j)); });
    ptx::compiler_barrier();
    delta = QueryValues(queries.delta());
    attention::for_each_score<Scores>([&](int i, int j) {
      const float p = attention::unclamped_probability(s.at(i, j));
      s.at(i, j) = IsPlain ? p : mask.at(i, j) ? attention::clamp_probability(p) : 0.0f;
    });
  }

  // Replace dP by dS = P (dP - delta), for 16 queries.
  template <class Mask>
  static CUFLASH_DEVICE void make_ds(Scores& p, Scores& dp, const QueryValues& delta, const Mask& mask, int k) {
    attention::for_each_score<Scores>(4 * k, 4 * (k + 1), [&](int i, int j) {
      dp.at(i, j) = mask.at(i, j) ? attention::score_gradient(p.at(i, j), dp.at(i, j), delta.at(j)) : 0.0f;
    });
  }

  // Replace dP by dS for all queries of a step. Pack P and dS as left operands of products, and store dS transposed for
  // the product dQ.
  template <bool IsPlain>
  static CUFLASH_DEVICE void make_operands(Scores& s, Scores& dp, PackedScores& p, PackedScores& ds,
                                           const QueryValues& delta, const StepQueries& queries, uint32_t ds_address) {
    const tile::Conditional<IsPlain, AllOfThread, MaskOfThread> mask(queries);
#pragma unroll
    for (int k = 0; k < PackedScores::kNumFragments; ++k) {
      make_ds(s, dp, delta, mask, k);
      p.pack(s, k);
      ds.pack(dp, k);
      if constexpr (kMakesDq) tile::store_transposed<SmemDs>(ds_address, ds, k);
    }
  }

  // In a step that is not plain, clamp P to 1 and set masked elements to 0; or set masked elements of dS to 0. Called
  // after all of P or dS has been computed.
  template <bool IsP>
  static CUFLASH_DEVICE void clamp_and_mask(Scores& x, const StepQueries& queries) {
    const MaskOfThread mask(queries);
    attention::for_each_score<Scores>([&](int i, int j) {
      x.at(i, j) = !mask.at(i, j) ? 0.0f : IsP ? attention::clamp_probability(x.at(i, j)) : x.at(i, j);
    });
    ptx::fence_registers(tile::accumulators(x));
  }

  // Replace S by P and dP by dS, once dP has arrived. They are computed as in a plain step, and then corrected if the
  // step is not plain. Thus all steps share the same code, which saves instruction fetches.
  static CUFLASH_DEVICE void make_p_and_ds(Scores& s, Scores& dp, const QueryValues& lse_2, const StepQueries& queries,
                                           float softmax_scale_log2) {
    QueryValues delta;
    make_p<true>(s, lse_2, delta, queries, softmax_scale_log2);
    tile::wait_wgmma<0>(dp);
    ptx::fence_registers(tile::accumulators(s));
    if (!queries.is_plain()) clamp_and_mask<true>(s, queries);
    const AllOfThread all(queries);
#pragma unroll
    for (int k = 0; k < PackedScores::kNumFragments; ++k) make_ds(s, dp, delta, all, k);
    ptx::fence_registers(tile::accumulators(dp));
    if (!queries.is_plain()) clamp_and_mask<false>(dp, queries);
  }
};

}  // namespace cuflash::sm90
