#pragma once
#include <attention/for_each_score.cuh>
#include <attention/mask_simt.cuh>
#include <attention/softmax_simt.cuh>
#include <tile/register_tile.cuh>

// P and dS in the backward pass: code for all families, code for the register tiles of simt kernels, and the epilogue
// of the gradients of simt kernels.
namespace cuflash::attention {

// Return lse in base 2; +inf for rows without a key, so that P, recomputed from it, is 0 there and never NaN.
template <class T>
CUFLASH_DEVICE T lse_in_base_2(T lse) {
  return lse == ptx::negative_infinity<T>() ? -lse : lse * T(kLog2E);
}

// Return P = exp2(scale log2(e) s - lse) of a score s. At logits of 1e6 and more, the rounding error of lse alone would
// raise P above 1; the minimum prevents this.
template <class T>
CUFLASH_DEVICE T probability(T s, T softmax_scale_log2, T lse_2) {
  return tile::min_or_nan(ptx::exp2_accurate(s * softmax_scale_log2 - lse_2), T(1));
}

// Return dS = P (dP - delta) of an attended key. A P of 0 does not suppress a dP or delta that is NaN or infinite.
template <class T>
CUFLASH_DEVICE T score_gradient(T p, T dp, T delta) {
  return p * (dp - delta);
}

// Return whether P marks a masked element: tiles of keys use -0 as the mark, which no exponential returns. The dS of
// such an element is 0, whatever dP and delta are.
CUFLASH_DEVICE bool is_masked(float p) { return __float_as_uint(p) == 0x80000000u; }
CUFLASH_DEVICE bool is_masked(double p) {
  return static_cast<unsigned long long>(__double_as_longlong(p)) == 0x8000000000000000ull;
}

// Compute lse (base 2) and delta = rowsum(dO o O) - dlse of a thread's rows of a tile; write delta to global memory
// too, for other kernels. Called by all threads.
template <class Element, int Rows, int Columns, class T, int NumRows>
CUFLASH_DEVICE void row_statistics(const Params& params, const WorkTile& work, T (&lse_2)[NumRows],
                                   T (&delta)[NumRows]) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const BatchHead& batch_head = work.batch_head;
  const int length = params.shape.seqlen_q;
  const auto o = matrix<Element>(params.o, batch_head, batch_head.head, length, params.shape.value_dim);
  const auto d_o = matrix<Element>(params.do_, batch_head, batch_head.head, length, params.shape.value_dim);
  const auto lse = matrix<T>(params.lse, batch_head, batch_head.head, length, 1);
  const auto dlse = matrix<T>(params.dlse, batch_head, batch_head.head, length, 1);
  const auto delta_out = matrix<T>(params.delta, batch_head, batch_head.head, length, 1);
#pragma unroll
  for (int i = 0; i < NumRows; ++i) {
    const int query = work.first + Tile::row(i);
    const bool in_bounds = query < work.last;
    lse_2[i] = in_bounds ? lse_in_base_2(lse.at(query, 0)) : -ptx::negative_infinity<T>();
    const bool is_empty = lse_2[i] == -ptx::negative_infinity<T>();
    T sum = 0;
#pragma unroll 4  // keeps pairs of loads in flight
    for (int j = 0; j < Tile::kColumns; ++j) {
      const int column = Tile::column(j);
      if (!is_empty && column < o.num_columns)
        sum += tile::to_accumulator(d_o.at(query, column)) * tile::to_accumulator(o.at(query, column));
    }
    sum = tile::row_sum(sum);
    if (!is_empty && params.dlse.data != nullptr) sum -= dlse.at(query, 0);
    delta[i] = sum;
    if (in_bounds && tile::is_row_leader()) delta_out.at(query, 0) = sum;
  }
}

// Replace dP by dS in one step of a tile of queries; dS of masked elements is 0.
template <class T, int Rows, int Columns, int NumRows>
CUFLASH_DEVICE void score_gradients_of_queries(const tile::RegisterTile<T, Rows, Columns>& s,
                                               tile::RegisterTile<T, Rows, Columns>& dp, const Params& params,
                                               const WorkTile& work, const KvBlock& block, const T (&lse_2)[NumRows],
                                               const T (&delta)[NumRows]) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const T softmax_scale_log2 = params.shape.softmax_scale * kLog2E;
  for_each_score_by_rows<Tile>([&](int i, int j) {
    const T p = probability(s.at[i][j], softmax_scale_log2, lse_2[i]);
    dp.at[i][j] = score_gradient(p, dp.at[i][j], delta[i]);
  });
  mask_scores(dp, params, work, block, T(0));
}

// Store lse (base 2) and delta of a step's queries in shared memory after the rows of the queries: in column `Column`
// and the next one of a tile whose rows are padded. Called by all threads.
template <int Column, class T, int Rows, int Columns, int Pitch>
CUFLASH_DEVICE void load_statistics(tile::SharedTile<T, Rows, Columns, Pitch> to, const KvBlock& block,
                                    const tile::Matrix<T>& lse, const tile::Matrix<T>& delta) {
  static_assert(Column >= Columns && Column + 2 <= Pitch, "the statistics lie in the padding of the rows");
#pragma unroll 1
  for (int row = threadIdx.x; row < Rows; row += tile::kThreads) {
    const int query = block.start + row;
    const bool in_bounds = query < block.stop;
    to.at(row, Column) = in_bounds ? lse_in_base_2(lse.at(query, 0)) : -ptx::negative_infinity<T>();
    to.at(row, Column + 1) = in_bounds ? delta.at(query, 0) : T(0);
  }
}

// Replace S^T by P^T in one step of a tile of keys; masked elements become -0. `lse_2` returns the lse of a query, by
// its column in the tile.
template <class T, int Rows, int Columns, class LseOf>
CUFLASH_DEVICE void probabilities_of_keys(tile::RegisterTile<T, Rows, Columns>& s, const Params& params,
                                          const WorkTile& work, const KvBlock& block, LseOf lse_2) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  const T softmax_scale_log2 = params.shape.softmax_scale * kLog2E;
  for_each_score<Tile>(
      0, Tile::kColumns, [&](int j) { return lse_2(Tile::column(j)); },
      [&](int i, int j, T query_lse_2) { s.at[i][j] = probability(s.at[i][j], softmax_scale_log2, query_lse_2); });
  if (block.kind == BlockKind::kFull && block.stop - block.start == Columns && work.last - work.first == Rows) return;
  const auto score_mask = score_mask_of_keys<Tile>(params, work, block);
  for_each_score<Tile>([&](int i, int j) {
    if (!score_mask.allows(j, i)) s.at[i][j] = -T(0);
  });
}

// Replace dP^T by dS^T in one step of a tile of keys. `p` returns P^T at a thread's row and column, and `delta` the
// delta of a query, by its column in the tile.
template <class T, int Rows, int Columns, class POf, class DeltaOf>
CUFLASH_DEVICE void score_gradients_of_keys(tile::RegisterTile<T, Rows, Columns>& dp, POf p, DeltaOf delta) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  for_each_score<Tile>(
      0, Tile::kColumns, [&](int j) { return delta(Tile::column(j)); },
      [&](int i, int j, T query_delta) {
        dp.at[i][j] = is_masked(p(i, j)) ? T(0) : score_gradient(p(i, j), dp.at[i][j], query_delta);
      });
}

// Return the keys of a tile that some query of a step may see, as rows of the tile. Rows of K at other keys must be
// read as 0: they may hold NaN, and a dS of 0 times NaN is NaN.
CUFLASH_DEVICE Interval visited_keys(const Params& params, const WorkTile& work, const KvBlock& block) {
  const int height = work.last - work.first;
  if (block.kind != BlockKind::kInterval) return {0, height};
  return {max(interval(params, work.batch_head, block.start).lo - work.first, 0),
          min(interval(params, work.batch_head, block.stop - 1).hi - work.first, height)};
}

// Store the rows of a gradient: in the accumulator's type if it is summed over broadcast axes afterwards, else in the
// dtype of the operands.
template <class Element, class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE void store_gradient(const Matrices& to, const WorkTile& work, int head, int num_rows, int num_columns,
                                   const tile::RegisterTile<T, Rows, Columns, Run>& gradient) {
  if (sizeof(Element) == sizeof(T) || to.is_accumulator) {  // one copy of the code if both types are equal
    tile::store(matrix<T>(to, work.batch_head, head, num_rows, num_columns).rows(work.first, work.last), gradient);
  } else {
    tile::store(matrix<Element>(to, work.batch_head, head, num_rows, num_columns).rows(work.first, work.last),
                gradient);
  }
}

}  // namespace cuflash::attention
