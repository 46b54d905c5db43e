#pragma once
#include <sm90/backward_tiles.cuh>

// P and dS of a step of sm90_backward, in registers, for calls without score function and dropout.
namespace cuflash {

// P in the place of q k^T, as attention::probability has it, or without its minimum. delta is asked for once lse is spent,
// and comes under the exponentials.
template <bool IsPlain>
CUFLASH_DEVICE void make_p(Scores& s, const QueryValues& lse_2, QueryValues& delta, const StepQueries& queries,
                           float softmax_scale_log2) {
  const ThreadMask<IsPlain> mask(queries);
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      s.at(i, j) = attention::score_exponent(s.at(i, j), softmax_scale_log2, lse_2.at(j));
  ptx::compiler_barrier();
  delta = QueryValues(queries.delta());
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float p = attention::unclamped_probability(s.at(i, j));
      s.at(i, j) = IsPlain ? p : mask.at(i, j) ? attention::clamp_probability(p) : 0.0f;
    }
}

// dS = P (dP - delta) in the place of dP, for 16 queries.
template <bool IsPlain>
CUFLASH_DEVICE void make_ds(Scores& p, Scores& dp, const QueryValues& delta, const ThreadMask<IsPlain>& mask, int k) {
#pragma unroll
  for (int j = 4 * k; j < 4 * (k + 1); ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      dp.at(i, j) = mask.at(i, j) ? attention::score_gradient(p.at(i, j), dp.at(i, j), delta.at(j)) : 0.0f;
}

// The same for all; and P and dS as left operands, and dS, transposed, where dQ's product reads it.
template <bool IsPlain>
CUFLASH_DEVICE void make_operands(Scores& s, Scores& dp, PackedScores& p, PackedScores& ds, const QueryValues& delta,
                                  const StepQueries& queries, uint32_t ds_address) {
  const ThreadMask<IsPlain> mask(queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k) {
    make_ds(s, dp, delta, mask, k);
    p.pack(s, k);
    ds.pack(dp, k);
    if constexpr (kMakesDq) tile::store_transposed<SmemDs>(ds_address, ds, k);
  }
}

// P, of no more than 1, or dS of a step that is not plain, where all of it was made: 0 where it is hidden.
template <bool IsP>
CUFLASH_DEVICE void clamp_and_mask(Scores& x, const StepQueries& queries) {
  const ThreadMask<false> mask(queries);
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i)
      x.at(i, j) = !mask.at(i, j) ? 0.0f : IsP ? attention::clamp_probability(x.at(i, j)) : x.at(i, j);
  ptx::fence_registers(tile::accumulators(x));
}

// P and dS, once dP is there, in their places: as of a plain step, and mended if it is none. Code that steps share is in one
// piece, which waits for no instructions.
CUFLASH_DEVICE void make_p_and_ds(Scores& s, Scores& dp, const QueryValues& lse_2, const StepQueries& queries,
                                  float softmax_scale_log2) {
  QueryValues delta;
  make_p<true>(s, lse_2, delta, queries, softmax_scale_log2);
  tile::wait_wgmma<0>(dp);
  ptx::fence_registers(tile::accumulators(s));
  if (!queries.is_plain()) clamp_and_mask<true>(s, queries);
  const ThreadMask<true> all(queries);
#pragma unroll
  for (int k = 0; k < PackedScores::kNumFragments; ++k) make_ds(s, dp, delta, all, k);
  ptx::fence_registers(tile::accumulators(dp));
  if (!queries.is_plain()) clamp_and_mask<false>(dp, queries);
}

}  // namespace cuflash
