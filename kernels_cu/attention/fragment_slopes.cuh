#pragma once
// Included first, since the `probability` with the approximate exponential must be declared before its use.
#include <attention/score_gradient_mma.cuh>
#include <attention/score_slopes.cuh>

// Gradients of scores that a score function has changed, in tensor-core kernels.
namespace cuflash::attention {

// Compute P and dS as `scores_to_p_and_ds` does, from scores in the accumulator layout of tensor cores whose rows are
// queries. In a masked step, `masked_score` marks masked scores. `holds` is false in warps whose elements another warp
// holds too.
template <class Tile, class Score>
CUFLASH_DEVICE void scores_to_p_and_ds_of_rows(Tile& s, Tile& dp, const Score& score, const Shape& shape,
                                               const BatchHead& batch_head, const Positions& queries,
                                               const Positions& keys, bool is_masked, const RowStatistics<Tile>& row,
                                               bool holds) {
  scores_to_p_and_ds<Rows::kQueries>(
      [&](int i, int j) -> float& { return s.at(i, j); }, dp, score, shape, batch_head, queries, keys,
      [&](int i, int j) { return !is_masked || !is_masked_score(s.at(i, j)); }, [&](int i) { return row.lse_2[i]; },
      [&](int i) { return row.delta[i]; }, Score::kAddsGradients && holds);
}

}  // namespace cuflash::attention
