#pragma once
#include <attention/dropout.cuh>
#include <attention/score_gradient_mma.cuh>

// P and dS under dropout, in tensor-core kernels.
namespace cuflash::attention {

// Compute P and dS under dropout, as `score_gradients` does without it, from scores in the accumulator layout of tensor
// cores whose rows are queries. P contains the weights that dropout keeps, not yet multiplied by `factor`; dS contains
// all elements.
template <class Tile>
CUFLASH_DEVICE void dropout_score_gradients(Tile& s, Tile& dp, const Dropout& dropout, uint32_t head, int first_query,
                                            int first_key, bool is_masked, float softmax_scale_log2,
                                            const RowStatistics<Tile>& row) {
  const float factor = dropout.single_factor;
  const auto kept = kept_fragments<false>(s, Draws(dropout), head, first_query, first_key);
  for_each_score_by_rows<Tile>([&](int i, int j) {
    const bool is_kept = kept.at(i, j), is_allowed = !is_masked || !is_masked_score(s.at(i, j));
    const float p = probability(s.at(i, j), softmax_scale_log2, row.lse_2[i]);
    const float by_weight = is_kept ? dp.at(i, j) * factor : 0.0f;
    s.at(i, j) = is_allowed && is_kept ? p : 0.0f;
    dp.at(i, j) = is_allowed ? score_gradient(p, by_weight, row.delta[i]) : 0.0f;
  });
}

}  // namespace cuflash::attention
