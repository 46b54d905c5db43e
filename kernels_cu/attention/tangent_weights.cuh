#pragma once
#include <attention/score.cuh>
#include <attention/score_gradient.cuh>
#include <attention/sink.cuh>
#include <attention/tangents.cuh>

// Weights and their tangents in the pass that computes the tangents of o and lse, for all families. A dot marks a
// tangent. Let F be the final scores, P = exp(F - lse), and c one number per row: the mean of F_dot over the keys that
// the row attends in its first step with such keys. Then
//
//   w = P (F_dot - c)    rise = sum w + P_sink (sink_dot - c)    o_dot = sum w v + sum P v_dot - rise o
//   lse_dot = c + rise
//
// Without c, a change of F_dot that all keys share would cost precision: F_dot - c is small if rise is.
namespace cuflash::attention {

// Return a score's tangent, and replace the score by the score function of the score times `scale`.
template <class T, class Score, class OfTile, class OfQuery, class OfKey>
CUFLASH_DEVICE T score_tangent(T& s, T s_dot, const Score& score, const OfTile& of_tile, const OfQuery& of_query,
                               const OfKey& of_key, int query, int key, T scale) {
  typename Score::Derivatives moved;
  s = score.value(of_tile, of_query, of_key, query, key, s * scale, moved, s_dot * scale);
  return moved.d0;
}

// Replace q k^T by the score function of q k^T times `scale`, and the tangents of q k^T by those of the score function.
// Rows are queries of one head.
template <class Tile, class Score>
CUFLASH_DEVICE void score_tangents_of_queries(Tile& s, Tile& s_dot, const Score& score, typename Score::Number scale,
                                              const WorkTile& work, const KvBlock& block) {
  using T = typename Score::Number;
  const Positions queries{work.first, work.last}, keys{block.start, block.stop};
  const auto of_tile = score.of_tile(work.batch_head.batch_index, work.batch_head.head);
  typename Score::OfQuery of_query[Tile::kRows];
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) of_query[i] = score.of_query(of_tile, queries.at(row_of(s, i)));
  for_each_score<Tile>(
      0, Tile::kColumns, [&](int j) { return keys.at(column_of(s, j)); },
      [&](int i, int j, int key) {
        T& x_dot = element(s_dot, i, j);
        x_dot = score_tangent(element(s, i, j), x_dot, score, of_tile, of_query[i], score.of_key(of_tile, key),
                              queries.at(row_of(s, i)), key, scale);
      });
}

// The values from which a row's tangents are computed. A thread holds the sums of its own columns.
template <class T, int Rows>
struct RowTangents {
  T lse_2[Rows];  // base 2; +inf for rows without a key and past the end
  T center[Rows];  // c, or 0 until the row attends a key
  T sum[Rows];  // sum of w
  uint32_t has_key = 0;  // one bit per row

  template <class Column, class RowOf>
  CUFLASH_DEVICE RowTangents(const Column& lse, RowOf row_of) {
    static_assert(Rows <= 32, "rows have a bit each");
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      lse_2[i] = row_of(i) < lse.num_rows ? lse_in_base_2(lse.at(row_of(i), 0)) : -ptx::negative_infinity<T>();
      center[i] = 0;
      sum[i] = 0;
    }
  }

  // Set the centers of rows that attend their first keys, from tangents times `scale`. `is_seen` is a function of a
  // thread's row and column; `row_sum` adds up one number from each thread that shares a row. Called by whole warps.
  template <class Tile, class IsSeen, class RowSum>
  CUFLASH_DEVICE void find_centers(Tile& f_dot, T scale, IsSeen is_seen, RowSum row_sum) {
    constexpr uint32_t kAll = Rows == 32 ? ~0u : (1u << Rows) - 1;
    if (!__any_sync(0xffffffffu, has_key != kAll)) return;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      T total = 0, count = 0;
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) {
        if (!is_seen(i, j)) continue;
        if constexpr (kMovesScores) total += element(f_dot, i, j) * scale;
        count += 1;
      }
      count = row_sum(count);
      total = row_sum(total);
      if (has_key >> i & 1 || count == 0) continue;
      center[i] = total / count;
      has_key |= 1u << i;
    }
  }
};

// Replace scores, times `scale_log2`, by P, and their tangents, times `scale`, by w. Masked elements, for which
// `is_allowed` is false, become -0 and 0. Called by whole warps.
template <bool IsMasked, class Tile, class T, int Rows, class IsAllowed, class RowSum>
CUFLASH_DEVICE void weights_and_tangents(Tile& s, Tile& s_dot, RowTangents<T, Rows>& rows, T scale_log2, T scale,
                                         IsAllowed is_allowed, RowSum row_sum) {
  // With a score function, a key whose weight is 0 does not count, whatever its derivatives are.
  const auto is_seen = [&](int i, int j) {
    return kHasScore ? element(s, i, j) != 0 : !IsMasked || !is_masked(element(s, i, j));
  };
  for_each_score_by_rows<Tile>([&](int i, int j) {
    T& p = element(s, i, j);
    p = !IsMasked || is_allowed(i, j) ? probability(p, scale_log2, rows.lse_2[i]) : -T(0);
    if constexpr (kMovesScores && (IsMasked || kHasScore))
      if (!is_seen(i, j)) element(s_dot, i, j) = 0;
  });
  rows.find_centers(s_dot, scale, is_seen, row_sum);
  if constexpr (kMovesScores)
    for_each_score_by_rows<Tile>([&](int i, int j) {
      T& w = element(s_dot, i, j);
      w = element(s, i, j) * ptx::fma(w, scale, -rows.center[i]);
      rows.sum[i] += w;
    });
}

// The tangent of a row's lse, and the values that its o_dot depends on: rise, and whether o_dot is 0, or NaN like lse.
template <class T>
struct RowResult {
  T lse, lse_dot, rise;
  bool is_zero;

  // Return o_dot from the row's products with v and v_dot, and from o.
  CUFLASH_DEVICE T o_dot(T products, T o) const {
    return lse != lse ? lse : is_zero ? T(0) : ptx::fma(-rise, o, products);
  }
};

// Return the results of a row, from the sum of w over all of its columns.
template <class T, class SinkRecord>
CUFLASH_DEVICE RowResult<T> row_result(T sum, T center, bool has_key, T lse, const SinkRecord& sink,
                                       const Tangents& tangents, const BatchHead& batch_head, int head) {
  T rise = sum;
  if constexpr (Config::kHasSink) {
    const T logit = sink_logit<T>(sink, batch_head, head);
    const T logit_dot = Config::kHasSinkDot ? of_head<T>(tangents.sink_dot, sink.dtype, batch_head, head) : T(0);
    if (logit != ptx::negative_infinity<T>())
      rise += tile::min_or_nan(sink_weight(logit, lse), T(1)) * (logit_dot - center);
  }
  const bool is_empty = lse == ptx::negative_infinity<T>();
  const T lse_dot = lse != lse ? lse : is_empty ? T(0) : center + rise;
  return {lse, lse_dot, rise, is_empty || !has_key};
}

}  // namespace cuflash::attention
