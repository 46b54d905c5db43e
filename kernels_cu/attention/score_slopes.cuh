#pragma once
#include <attention/score.cuh>
#include <attention/score_gradient.cuh>
#include <tile/conditional.cuh>

// Gradients of scores that a score function has changed.
namespace cuflash::attention {

// The kind of the rows of a tile of scores. If rows are queries, columns are keys, and the other way around.
enum class Rows { kQueries, kKeys };

// Replace q k^T of an element by P = exp2(log2(e) f - lse), and dP by dS = dF f' with dF = P (dP - delta). All are 0
// where P is 0, whatever f' and dP are there, and in rows without a key. If `adds`, also add dF times the slopes to the
// gradients of captured arrays.
template <class T, class Score, class OfTile, class OfQuery, class OfKey, class... Sums>
CUFLASH_DEVICE void score_to_p_and_ds(T& s, T& dp, const Score& score, const OfTile& of_tile, const OfQuery& of_query,
                                      const OfKey& of_key, int query, int key, T scale, T lse_2, T delta, bool is_seen,
                                      bool adds, Sums&... sums) {
  typename Score::Derivatives slopes;
  const T scaled = s * scale;
  const T f = score.value(of_tile, of_query, of_key, query, key, scaled, slopes);
  const bool in_bounds = is_seen && lse_2 != -ptx::negative_infinity<T>();
  const T p = in_bounds ? probability(f, T(kLog2E), lse_2) : T(0);
  const T df = p == 0 ? T(0) : score_gradient(p, dp, delta);
  s = p;
  dp = p == 0 ? T(0) : df * slopes.d0;
  // With bins an addition of 0 costs less than a branch.
  if (adds && (Score::kNumBins > 0 || p != 0))
    score.add(of_tile, of_query, of_key, query, key, scaled, df, slopes, sums...);
}

// Replace q k^T by P and dP by dS. `s` returns the element at a thread's row and column. If `adds`, gradients of
// captured arrays are added up. Statistics are functions of a thread's row, or column, of queries. Called by whole
// warps.
template <Rows Orientation, class Tile, class Score, class ElementOf, class RowMask, class LseOf, class DeltaOf>
CUFLASH_DEVICE void scores_to_p_and_ds(ElementOf s, Tile& dp, const Score& score, const Shape& shape,
                                       const BatchHead& batch_head, const Positions& rows, const Positions& columns,
                                       RowMask is_seen, LseOf lse_2, DeltaOf delta, bool adds) {
  using T = typename Score::Number;
  constexpr bool kRowsAreQueries = Orientation == Rows::kQueries;
  const T scale = shape.softmax_scale;
  const auto of_tile = score.of_tile(batch_head.batch_index, batch_head.head);
  typename Score::OfTileSums tile_sums;
  typename Score::OfScoreSums score_sums;
  using OfRow = tile::Conditional<kRowsAreQueries, typename Score::OfQuery, typename Score::OfKey>;
  using RowSums = tile::Conditional<kRowsAreQueries, typename Score::OfQuerySums, typename Score::OfKeySums>;
  struct Column {
    int position;
    tile::Conditional<kRowsAreQueries, typename Score::OfKey, typename Score::OfQuery> values;
    tile::Conditional<kRowsAreQueries, typename Score::OfKeySums, typename Score::OfQuerySums> sums;
  };
  OfRow of_row[Tile::kRows];
  RowSums row_sums[Tile::kRows];
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int row = rows.at(row_of(dp, i));
    if constexpr (kRowsAreQueries) of_row[i] = score.of_query(of_tile, row);
    else of_row[i] = score.of_key(of_tile, row);
  }
  const auto column_of = [&](int j) -> Column {
    const int column = columns.at(attention::column_of(dp, j));
    if constexpr (kRowsAreQueries) return {column, score.of_key(of_tile, column), {}};
    else return {column, score.of_query(of_tile, column), {}};
  };
  const auto visit = [&](int i, int j, Column& column) {
    const int row = rows.at(row_of(dp, i));
    if constexpr (kRowsAreQueries)
      score_to_p_and_ds(s(i, j), element(dp, i, j), score, of_tile, of_row[i], column.values, row, column.position,
                        scale, lse_2(i), delta(i), is_seen(i, j), adds, tile_sums, row_sums[i], column.sums,
                        score_sums);
    else
      score_to_p_and_ds(s(i, j), element(dp, i, j), score, of_tile, column.values, of_row[i], column.position, row,
                        scale, lse_2(j), delta(j), is_seen(i, j), adds, tile_sums, column.sums, row_sums[i],
                        score_sums);
  };
  for_each_score<Tile>(0, Tile::kColumns, column_of, visit, [&](const Column& column) {
    if (adds) score.flush(of_tile, column.values, column.sums);
  });
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
    if (adds) score.flush(of_tile, of_row[i], row_sums[i]);
  if (adds) score.flush(of_tile, tile_sums);
  if (adds) score.flush(score_sums);
}

// Compute dS in one step of a tile of queries, as `scores_to_p_and_ds` does, in the registers of dP. P is not needed
// afterwards.
template <class T, int NumRows, int NumColumns, int Kept, class Score>
CUFLASH_DEVICE void scores_to_p_and_ds_of_queries(tile::RegisterTile<T, NumRows, NumColumns>& s,
                                                  tile::RegisterTile<T, NumRows, NumColumns>& dp, const Score& score,
                                                  const Params& params, const WorkTile& work, const KvBlock& block,
                                                  const T (&lse_2)[Kept], const T (&delta)[Kept]) {
  using Tile = tile::RegisterTile<T, NumRows, NumColumns>;
  const bool is_whole = block.kind == BlockKind::kFull && block.stop - block.start == NumColumns;
  ScoreMask<Tile::kColumns> row_mask{~0ull};
  if (!is_whole) row_mask = score_mask_of_queries<Tile>(params, work, block);
  scores_to_p_and_ds<Rows::kQueries>(
      [&](int i, int j) -> T& { return s.at[i][j]; }, dp, score, params.shape, work.batch_head, {work.first, work.last},
      {block.start, block.stop}, [&](int i, int j) { return row_mask.allows(i, j); }, [&](int i) { return lse_2[i]; },
      [&](int i) { return delta[i]; }, Score::kAddsGradients);
}

// Compute P and dS in one step of a tile of keys, as `scores_to_p_and_ds` does. Its rows are keys; `lse_2` and `delta`
// are functions of a query's column in the tile.
template <class T, int NumRows, int NumColumns, class Score, class ElementOf, class LseOf, class DeltaOf>
CUFLASH_DEVICE void scores_to_p_and_ds_of_keys(ElementOf s, tile::RegisterTile<T, NumRows, NumColumns>& dp,
                                               const Score& score, const Params& params, const WorkTile& work,
                                               const KvBlock& block, LseOf lse_2, DeltaOf delta) {
  using Tile = tile::RegisterTile<T, NumRows, NumColumns>;
  const bool is_whole =
      block.kind == BlockKind::kFull && block.stop - block.start == NumColumns && work.last - work.first == NumRows;
  ScoreMask<Tile::kRows> row_mask{~0ull};
  if (!is_whole) row_mask = score_mask_of_keys<Tile>(params, work, block);
  scores_to_p_and_ds<Rows::kKeys>(
      s, dp, score, params.shape, work.batch_head, {work.first, work.last}, {block.start, block.stop},
      [&](int i, int j) { return row_mask.allows(j, i); }, [&](int j) { return lse_2(Tile::column(j)); },
      [&](int j) { return delta(Tile::column(j)); }, Score::kAddsGradients);
}

}  // namespace cuflash::attention
