#pragma once
#include <attention/score_gradient_mma.cuh>  // first, as P is made by its approximate exponential
#include <attention/score_slopes.cuh>

namespace cuflash::attention {

// `score_pairs` of scores as tensor cores leave them, whose rows are queries. Where the step is masked, `masked_score` tells
// what is hidden. `holds` is false for warps whose elements other warps hold too.
template <class Tile, class Score>
CUFLASH_DEVICE void score_pairs_of_rows(Tile& s, Tile& dp, const Score& score, const Shape& shape,
                                        const BatchHead& batch_head,
                                        const Positions& queries, const Positions& keys, bool is_masked,
                                        const RowStatistics<Tile>& row, bool holds) {
  score_pairs<Rows::kQueries>(
      [&](int i, int j) -> float& { return s.at(i, j); }, dp, score, shape, batch_head, queries, keys,
      [&](int i, int j) { return !is_masked || !is_masked_score(s.at(i, j)); }, [&](int i) { return row.lse_2[i]; },
      [&](int i) { return row.delta[i]; }, Score::kAddsGradients && holds);
}

}  // namespace cuflash::attention
