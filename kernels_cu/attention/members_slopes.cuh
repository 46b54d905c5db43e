#pragma once
#include <attention/fragment_slopes.cuh>
#include <attention/members.cuh>

// Gradients of scores that a score function has changed, in tiles whose rows differ in head and query.
namespace cuflash::attention {

// Compute P and dS as `scores_to_p_and_ds` does, for rows of several heads: `query_of` returns the head and query of a
// thread's row. Gradients of captured arrays are not computed. In a masked step, `masked_score` marks masked scores.
template <class Tile, class Score, class QueryOf>
CUFLASH_DEVICE void scores_to_p_and_ds_of_heads(Tile& s, Tile& dp, const Score& score, const Shape& shape,
                                                const BatchHead& batch_head, QueryOf query_of, const Positions& keys,
                                                bool is_masked, const RowStatistics<Tile>& row) {
  static_assert(!Score::kAddsGradients, "sums of a tile are those of one head");
  typename Score::OfTileSums tile_sums;
  typename Score::OfQuerySums query_sums;
  typename Score::OfKeySums key_sums;
  typename Score::OfScoreSums score_sums;
  const typename Score::Number scale = shape.softmax_scale;
  HeadAndQuery rows[Tile::kRows];
  typename Score::OfTile of_tile[Tile::kRows];
  typename Score::OfQuery of_query[Tile::kRows];
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    rows[i] = query_of(i);
    of_tile[i] = score.of_tile(batch_head.batch_index, rows[i].head);
    of_query[i] = score.of_query(of_tile[i], rows[i].query);
  }
  for_each_score<Tile>(
      0, Tile::kColumns, [&](int j) { return keys.at(column_of(dp, j)); },
      [&](int i, int j, int key) {
        const auto of_key = score.of_key(of_tile[i], key);
        const bool is_seen = !is_masked || !is_masked_score(s.at(i, j));
        score_to_p_and_ds(s.at(i, j), dp.at(i, j), score, of_tile[i], of_query[i], of_key, rows[i].query, key, scale,
                          row.lse_2[i], row.delta[i], is_seen, false, tile_sums, query_sums, key_sums, score_sums);
      });
}

// Compute P and dS of a step of a tile of queries (`..._of_tile`) or of a tile of keys (`..._of_step`).
template <class Tile, class Score>
CUFLASH_DEVICE void scores_to_p_and_ds_of_tile(Tile& s, Tile& dp, const Score& score, const Params& params,
                                               NoChosenLists, const WorkTile& work, const KvBlock& block,
                                               bool is_masked, const RowStatistics<Tile>& row) {
  scores_to_p_and_ds_of_rows(s, dp, score, params.shape, work.batch_head, {work.first, work.last},
                             {block.start, block.stop}, is_masked, row, true);
}
template <class Tile, class Score>
CUFLASH_DEVICE void scores_to_p_and_ds_of_tile(Tile& s, Tile& dp, const Score& score, const Params& params,
                                               const ChosenLists& chosen, const WorkTile& work, const KvBlock& block,
                                               bool is_masked, const RowStatistics<Tile>& row) {
  scores_to_p_and_ds_of_heads(
      s, dp, score, params.shape, work.batch_head,
      [&](int i) { return head_and_query_of_neighbours(chosen, work, row_of(dp, i)); }, {block.start, block.stop},
      is_masked, row);
}
template <class Tile, class Score>
CUFLASH_DEVICE void scores_to_p_and_ds_of_step(Tile& s, Tile& dp, const Score& score, const Params& params,
                                               NoChosenLists, const WorkTile& work, const KvBlock& block,
                                               bool is_masked, const RowStatistics<Tile>& row) {
  scores_to_p_and_ds_of_rows(s, dp, score, params.shape, work.batch_head, {block.start, block.stop},
                             {work.first, work.last}, is_masked, row, Tile::is_first_owner());
}
template <class Tile, class Score>
CUFLASH_DEVICE void scores_to_p_and_ds_of_step(Tile& s, Tile& dp, const Score& score, const Params& params,
                                               const ChosenLists& chosen, const WorkTile& work, const KvBlock& block,
                                               bool is_masked, const RowStatistics<Tile>& row) {
  scores_to_p_and_ds_of_heads(
      s, dp, score, params.shape, work.batch_head,
      [&](int i) -> HeadAndQuery {
        const DivMod number = divmod(row_of(dp, i), chosen.heads_per_tile);
        return {work.batch_head.head + number.remainder,
                chosen.queries[min(block.start + number.quotient, block.stop - 1)]};
      },
      {work.first, work.last}, is_masked, row);
}

}  // namespace cuflash::attention
