#pragma once
#include <attention/dropout.cuh>
#include <attention/mask_simt.cuh>
#include <attention/score.cuh>
#include <attention/score_gradient.cuh>
#include <attention/score_slopes.cuh>
#include <attention/sink.cuh>
#include <attention/tangents.cuh>

// The tangents of P and dS, for all families. A dot marks a tangent. With D = rowsum(dO o O)
// - dlse, and F for final scores,
//
//   P_dot  = P (F_dot - lse_dot)                     dF  = P (dP - D)
//   dF_dot = P_dot (dP - D) + P (dP_dot - D_dot)     dS  = f' dF      dS_dot = f' dF_dot + (f')_dot dF
namespace cuflash::attention {

// Statistics of a query: lse in base 2 (+inf for queries without a key and past the end), lse_dot, D and D_dot.
template <class T>
struct QueryTangents {
  T lse_2, lse_dot, delta, delta_dot;
};

// Return the statistics of a query, from the workspaces of D and D_dot.
template <class T>
CUFLASH_DEVICE QueryTangents<T> query_tangents(const Params& params, const Tangents& tangents,
                                               const BatchHead& batch_head, int query, bool in_bounds) {
  const auto at = [&](const Matrices& x) {
    return in_bounds ? matrix<T>(x, batch_head, batch_head.head, params.shape.seqlen_q, 1).at(query, 0) : T(0);
  };
  return {in_bounds ? lse_in_base_2(at(params.lse)) : -ptx::negative_infinity<T>(), at(tangents.lse_dot),
          at(tangents.delta), at(tangents.delta_dot)};
}

// Store D and D_dot of a row of a tile. The threads that share the row call this function together, each for every
// `stride`-th column from `first_column` on; `row_sum` adds up their values. If the sink has a gradient,
// (sink_dot - lse_dot) D + D_dot is stored too, since the tangent of that gradient is a sum of such terms. In a row
// without a key, o is 0 and lse is the sink, so only dlse_dot contributes.
template <class T, class SinkRecord, class RowSum>
CUFLASH_DEVICE void store_query_tangents(const Params& params, const Tangents& tangents, const SinkRecord& sink,
                                         const WorkTile& work, int row, int first_column, int stride,
                                         RowSum row_sum) {
  using Element = Config::Element;
  const BatchHead& batch_head = work.batch_head;
  const int head = batch_head.head, length = params.shape.seqlen_q, query = work.first + row;
  const bool in_bounds = query < work.last;
  const auto rows_of = [&](auto zero, const Matrices& x, int columns) {
    return matrix<decltype(zero)>(x, batch_head, head, length, columns);
  };
  const auto o = rows_of(Element{}, params.o, params.shape.value_dim);
  const auto o_dot = rows_of(Element{}, tangents.o_dot, params.shape.value_dim);
  const auto d_o = rows_of(Element{}, params.do_, params.shape.value_dim);
  const auto do_dot = rows_of(Element{}, tangents.do_dot, params.shape.value_dim);
  const T lse = in_bounds ? rows_of(T(), params.lse, 1).at(query, 0) : ptx::negative_infinity<T>();
  const bool is_empty = lse == ptx::negative_infinity<T>();
  T delta = 0, delta_dot = 0, has_o = 0;
  for (int column = first_column; !is_empty && column < o.num_columns; column += stride) {
    const T of_o = tile::to_accumulator(o.at(query, column)), of_do = tile::to_accumulator(d_o.at(query, column));
    delta += of_do * of_o;
    delta_dot += of_do * tile::to_accumulator(o_dot.at(query, column));
    if constexpr (Config::kHasDoDot) delta_dot += tile::to_accumulator(do_dot.at(query, column)) * of_o;
    if (of_o != 0) has_o = 1;
  }
  delta = row_sum(delta);
  delta_dot = row_sum(delta_dot);
  has_o = row_sum(has_o);
  T dlse_dot = 0;
  if (!is_empty && params.dlse.data != nullptr) delta -= rows_of(T(), params.dlse, 1).at(query, 0);
  if (!is_empty && tangents.dlse_dot.data != nullptr) dlse_dot = rows_of(T(), tangents.dlse_dot, 1).at(query, 0);
  delta_dot -= dlse_dot;
  if (in_bounds && first_column == 0) {
    rows_of(T(), tangents.delta, 1).at(query, 0) = delta;
    rows_of(T(), tangents.delta_dot, 1).at(query, 0) = delta_dot;
    if constexpr (Config::kHasSink) {
      const T logit = sink_logit<T>(sink, batch_head, head);
      const T logit_dot = Config::kHasSinkDot ? of_head<T>(tangents.sink_dot, sink.dtype, batch_head, head) : T(0);
      const T lse_dot = rows_of(T(), tangents.lse_dot, 1).at(query, 0);
      const bool is_alone = lse == logit && has_o == 0;
      rows_of(T(), params.delta, 1).at(query, 0) =
          is_alone ? -dlse_dot : (logit_dot - lse_dot) * delta + delta_dot;
    }
  }
}

// Replace q k^T by P, the tangents of q k^T by P_dot, dP by dS and dP_dot by dS_dot, in a tile of one head whose rows
// are queries or keys. All of them are 0 where `is_allowed` is false and, with a score function, where P is 0. `row_of`
// returns the statistics of the query in a thread's row (or column).
template <Rows Orientation, class Tile, class Score, class IsAllowed, class RowOf>
CUFLASH_DEVICE void gradient_tangents(Tile& s, Tile& s_dot, Tile& dp, Tile& dp_dot, const Score& score,
                                      const Params& params, const WorkTile& work, const KvBlock& block,
                                      IsAllowed is_allowed, RowOf row_of) {
  using T = typename Score::Number;
  constexpr bool kRowsAreQueries = Orientation == Rows::kQueries;
  const T scale = params.shape.softmax_scale, scale_log2 = T(params.shape.softmax_scale * kLog2E);
  const Positions rows{work.first, work.last}, columns{block.start, block.stop};
  for_each_score_by_rows<Tile>([&](int i, int j) {
    const QueryTangents<T> row = row_of(kRowsAreQueries ? i : j);
    T f = element(s, i, j), f_dot = element(s_dot, i, j) * scale, slope = 1, slope_dot = 0;
    T p;
    if constexpr (kHasScore) {
      const int of_row = rows.at(attention::row_of(s, i)), of_column = columns.at(column_of(s, j));
      const int query = kRowsAreQueries ? of_row : of_column, key = kRowsAreQueries ? of_column : of_row;
      const auto of_tile = score.of_tile(work.batch_head.batch_index, work.batch_head.head);
      const auto of_query = score.of_query(of_tile, query);
      const auto of_key = score.of_key(of_tile, key);
      typename Score::Derivatives moved;
      if constexpr (kMovesScores) {
        f = score.value(of_tile, of_query, of_key, query, key, f * scale, moved, f_dot);
        f_dot = moved.d1;
        slope_dot = moved.d2;
      } else {
        f = score.value(of_tile, of_query, of_key, query, key, f * scale, moved);
      }
      slope = moved.d0;
      p = probability(f, T(kLog2E), row.lse_2);
    } else {
      p = probability(f, scale_log2, row.lse_2);
    }
    const bool is_seen = is_allowed(i, j) && row.lse_2 != -ptx::negative_infinity<T>() && (!kHasScore || p != 0);
    if (!is_seen) {
      element(s, i, j) = element(s_dot, i, j) = element(dp, i, j) = element(dp_dot, i, j) = 0;
      return;
    }
    const T p_dot = p * ((kMovesScores ? f_dot : T(0)) - row.lse_dot);
    const T gap = element(dp, i, j) - row.delta, gap_dot = element(dp_dot, i, j) - row.delta_dot;
    const T df = p * gap, df_dot = ptx::fma(p_dot, gap, p * gap_dot);
    element(s, i, j) = p;
    element(s_dot, i, j) = p_dot;
    element(dp, i, j) = df * slope;
    element(dp_dot, i, j) = kHasScore ? ptx::fma(df_dot, slope, df * slope_dot) : df_dot;
  });
}

}  // namespace cuflash::attention
