#pragma once
#include <attention/mask_simt.cuh>
#include <attention/mask_softmax_mma.cuh>

// The mask of a tile of keys whose scores are in the accumulator layout of tensor cores.
namespace cuflash::attention {

// Set the scores that a step of queries masks to the mark of masked scores. Rows are keys, columns are queries.
template <class Scores>
CUFLASH_DEVICE void mask_scores_of_keys(Scores& s, const Params& params, const WorkTile& work, const KvBlock& block) {
  const auto mask = score_mask<Scores::kColumns, Scores::kRows>(
      params, work.batch_head, block, [&](int j) { return block.start + column_of(s, j); }, block.stop,
      [&](int i) { return work.first + row_of(s, i); }, work.last);
  for_each_score<Scores>([&](int i, int j) {
    if (!mask.allows(j, i)) s.at(i, j) = masked_score();
  });
}

}  // namespace cuflash::attention
