#pragma once
#include <attention/online_softmax.cuh>
#include <attention/steps.cuh>
#include <tile/register_tile.cuh>

namespace cuflash::attention {

// lse in base 2; +inf in rows without a key, so that P, recomputed from it, is 0 there and never NaN.
template <class T>
CUFLASH_DEVICE T base_2(T lse) {
  return lse == ptx::negative_infinity<T>() ? -lse : lse * T(kLog2E);
}

// P = exp2(scale log2(e) q k^T - lse) of a score q k^T, 0 where the mask says no. At logits of 1e6 and more the rounding
// of lse alone would lift it above 1, hence the minimum.
template <class T>
CUFLASH_DEVICE T probability(T s, T softmax_scale_log2, T lse_2, bool is_allowed) {
  return is_allowed ? tile::lesser(ptx::exp2_accurate(s * softmax_scale_log2 - lse_2), T(1)) : T(0);
}

// dS = P (dP - delta), 0 where the mask says no: dP may be NaN there.
template <class T>
CUFLASH_DEVICE T score_gradient(T p, T dp, T delta, bool is_allowed) {
  return is_allowed ? p * (dp - delta) : T(0);
}

// lse (base 2) and delta = rowsum(dO o O) - dlse of a thread's rows of a tile; delta is written too, for other kernels.
// Called by all threads.
template <class Element, int Rows, int Columns, class T, int Kept>
CUFLASH_DEVICE void row_statistics(const Params& params, const WorkTile& work, T (&lse_2)[Kept], T (&delta)[Kept]) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const Place& place = work.place;
  const int length = params.shape.seqlen_q;
  const auto o = matrix<Element>(params.o, place, place.head, length, params.shape.value_dim);
  const auto d_o = matrix<Element>(params.do_, place, place.head, length, params.shape.value_dim);
  const auto lse = matrix<T>(params.lse, place, place.head, length, 1);
  const auto dlse = matrix<T>(params.dlse, place, place.head, length, 1);
  const auto kept = matrix<T>(params.delta, place, place.head, length, 1);
#pragma unroll
  for (int i = 0; i < Kept; ++i) {
    const int query = work.first + Tile::row(i);
    const bool is_there = query < work.last;
    lse_2[i] = is_there ? base_2(lse.at(query, 0)) : -ptx::negative_infinity<T>();
    const bool is_empty = lse_2[i] == -ptx::negative_infinity<T>();
    T sum = 0;
    for (int j = 0; j < Tile::kColumns; ++j) {
      const int column = Tile::column(j);
      if (!is_empty && column < o.num_columns) sum += tile::widen(d_o.at(query, column)) * tile::widen(o.at(query, column));
    }
    sum = tile::row_sum(sum);
    if (!is_empty && params.dlse.data != nullptr) sum -= dlse.at(query, 0);
    delta[i] = sum;
    if (is_there && tile::leads_rows()) kept.at(query, 0) = sum;
  }
}

// P and dS of a tile of queries in one step.
template <class T, int Rows, int Columns, int Kept>
CUFLASH_DEVICE void score_gradients_of_queries(tile::RegisterTile<T, Rows, Columns>& s,
                                               tile::RegisterTile<T, Rows, Columns>& dp, const Params& params,
                                               const WorkTile& work, const Step& step, const T (&lse_2)[Kept],
                                               const T (&delta)[Kept]) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const T softmax_scale_log2 = params.shape.softmax_scale * kLog2E;
  const bool is_whole = step.kind == Kind::kFull && step.stop - step.start == Columns;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int query = work.first + Tile::row(i);
    const Seen seen = step.seen(params, work.place, min(query, work.last - 1));
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) {
      const int key = step.start + Tile::column(j);
      const bool is_allowed = is_whole || (query < work.last && key < step.stop && seen.has(key));
      s.at[i][j] = probability(s.at[i][j], softmax_scale_log2, lse_2[i], is_allowed);
      dp.at[i][j] = score_gradient(s.at[i][j], dp.at[i][j], delta[i], is_allowed);
    }
  }
}

// Whether all scores of a tile of keys in one step are there and allowed.
template <int Rows, int Columns>
CUFLASH_DEVICE bool is_whole_step(const WorkTile& work, const Step& step) {
  return step.kind == Kind::kFull && step.stop - step.start == Columns && work.last - work.first == Rows;
}

// P^T and dS^T of a tile of keys in one step.
template <class T, int Rows, int Columns>
CUFLASH_DEVICE void score_gradients_of_keys(tile::RegisterTile<T, Rows, Columns>& s,
                                            tile::RegisterTile<T, Rows, Columns>& dp, const Params& params,
                                            const WorkTile& work, const Step& step, const tile::Matrix<T>& lse,
                                            const tile::Matrix<T>& delta) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const T softmax_scale_log2 = params.shape.softmax_scale * kLog2E;
#pragma unroll
  for (int j = 0; j < Tile::kColumns; ++j) {
    const int query = step.start + Tile::column(j);
    const bool is_there = query < step.stop;
    const T query_lse_2 = is_there ? base_2(lse.at(query, 0)) : -ptx::negative_infinity<T>();
    const T query_delta = is_there ? delta.at(query, 0) : T(0);
    const Seen seen = step.seen(params, work.place, min(query, step.stop - 1));
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int key = work.first + Tile::row(i);
      const bool is_allowed = is_there && key < work.last && seen.has(key);
      s.at[i][j] = probability(s.at[i][j], softmax_scale_log2, query_lse_2, is_allowed);
      dp.at[i][j] = score_gradient(s.at[i][j], dp.at[i][j], query_delta, is_allowed);
    }
  }
}

// P^T of a tile of keys in one step, from S^T.
template <class T, int Rows, int Columns>
CUFLASH_DEVICE void probabilities_of_keys(tile::RegisterTile<T, Rows, Columns>& s, const Params& params,
                                          const WorkTile& work, const Step& step, const tile::Matrix<T>& lse) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const T softmax_scale_log2 = params.shape.softmax_scale * kLog2E;
  const bool is_whole = is_whole_step<Rows, Columns>(work, step);
#pragma unroll
  for (int j = 0; j < Tile::kColumns; ++j) {
    const int query = step.start + Tile::column(j);
    const bool is_there = query < step.stop;
    const T lse_2 = is_there ? base_2(lse.at(query, 0)) : -ptx::negative_infinity<T>();
    const Seen seen = step.seen(params, work.place, min(query, step.stop - 1));
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int key = work.first + Tile::row(i);
      const bool is_allowed = is_whole || (is_there && key < work.last && seen.has(key));
      s.at[i][j] = probability(s.at[i][j], softmax_scale_log2, lse_2, is_allowed);
    }
  }
}

// dS^T of a tile of keys in one step, in the place of P^T, from dP^T. A thread reads and writes its own elements alone.
template <class T, int Rows, int Columns, int Pitch>
CUFLASH_DEVICE void score_gradients_of_keys(tile::SharedTile<T, Rows, Columns, Pitch> p_to_ds,
                                            const tile::RegisterTile<T, Rows, Columns>& dp, const Params& params,
                                            const WorkTile& work, const Step& step, const tile::Matrix<T>& delta) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const bool is_whole = is_whole_step<Rows, Columns>(work, step);
#pragma unroll
  for (int j = 0; j < Tile::kColumns; ++j) {
    const int query = step.start + Tile::column(j);
    const bool is_there = query < step.stop;
    const T query_delta = is_there ? delta.at(query, 0) : T(0);
    const Seen seen = step.seen(params, work.place, min(query, step.stop - 1));
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int key = work.first + Tile::row(i);
      const bool is_allowed = is_whole || (is_there && key < work.last && seen.has(key));
      T& element = p_to_ds.at(Tile::row(i), Tile::column(j));
      element = score_gradient(element, dp.at[i][j], query_delta, is_allowed);
    }
  }
}

// Which keys of a tile some query of a step may see, as rows of the tile. What stands at the others never matters, and
// the dS of 0 that they have would make NaN of NaN.
CUFLASH_DEVICE Interval visited_keys(const Params& params, const WorkTile& work, const Step& step) {
  const int height = work.last - work.first;
  if (step.kind != Kind::kInterval) return {0, height};
  return {max(interval(params, work.place, step.start).lo - work.first, 0),
          min(interval(params, work.place, step.stop - 1).hi - work.first, height)};
}

// Rows of a gradient, which is stored in the accumulator's dtype where it is summed over broadcast axes afterwards.
template <class Element, class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE void store_gradient(const Matrices& to, const WorkTile& work, int head, int num_rows, int num_columns,
                                   const tile::RegisterTile<T, Rows, Columns, Run>& gradient) {
  if (sizeof(Element) == sizeof(T) || to.is_wide) {  // one text where the two are one type
    tile::store(matrix<T>(to, work.place, head, num_rows, num_columns).rows(work.first, work.last), gradient);
  } else {
    tile::store(matrix<Element>(to, work.place, head, num_rows, num_columns).rows(work.first, work.last), gradient);
  }
}

}  // namespace cuflash::attention
