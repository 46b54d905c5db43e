#pragma once
#include <attention/mask_softmax_mma.cuh>
#include <attention/score_gradient.cuh>
#include <tile/copy_async.cuh>

// P, dS and the epilogue of gradients in the accumulator layout of tensor cores.
namespace cuflash::attention {

// Statistics of a thread's rows of scores: lse (base 2, +inf for rows without a key and past the end) and delta.
template <class Tile>
struct RowStatistics {
  float lse_2[Tile::kRows], delta[Tile::kRows];
};

// Load the statistics of a thread's rows from columns of numbers.
template <class Tile, class Column>
CUFLASH_DEVICE RowStatistics<Tile> row_statistics(const Column& lse, const Column& delta) {
  RowStatistics<Tile> statistics;
  const int first = Tile::first_row();
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int row = first + Tile::row(i);
    const bool in_bounds = row < lse.num_rows;
    statistics.lse_2[i] = in_bounds ? lse_in_base_2(lse.at(row, 0)) : -ptx::negative_infinity<float>();
    statistics.delta[i] = in_bounds ? delta.at(row, 0) : 0.0f;
  }
  return statistics;
}

// Return P = exp2(scale log2(e) s - lse) of a score s, in three parts that kernels interleave with products: the
// exponent, its power of 2, and the minimum with 1. At logits of 1e6 and more, the rounding error of lse alone would
// raise P above 1.
CUFLASH_DEVICE float score_exponent(float s, float softmax_scale_log2, float lse_2) {
  return ptx::fma(s, softmax_scale_log2, -lse_2);
}
CUFLASH_DEVICE float unclamped_probability(float exponent) { return ptx::exp2_approx(exponent); }
CUFLASH_DEVICE float clamp_probability(float p) { return ptx::min_or_nan(p, 1); }
CUFLASH_DEVICE float probability(float s, float softmax_scale_log2, float lse_2) {
  return clamp_probability(unclamped_probability(score_exponent(s, softmax_scale_log2, lse_2)));
}

// Replace q k^T by P and dP by dS = P (dP - delta). Masked elements have `masked_score` instead of q k^T.
template <bool IsMasked, class Tile>
CUFLASH_DEVICE void score_gradients(Tile& s, Tile& dp, float softmax_scale_log2, const RowStatistics<Tile>& row) {
  for_each_score_by_rows<Tile>([&](int i, int j) {
    const bool is_allowed = !IsMasked || !is_masked_score(s.at(i, j));
    const float p = probability(s.at(i, j), softmax_scale_log2, row.lse_2[i]);
    s.at(i, j) = is_allowed ? p : 0.0f;
    dp.at(i, j) = is_allowed ? score_gradient(p, dp.at(i, j), row.delta[i]) : 0.0f;
  });
}

// Multiply dP = dO V^T, and replace q k^T by P in a step without a mask. P is computed while the tensor cores multiply:
// a few of its columns after every 16 columns of dO. `store_columns` is called with the index of each group of eight
// columns of P once it is computed.
template <class Tile, class Do, class V, class StoreColumns = tile::NoOp>
CUFLASH_DEVICE void overlap_probabilities_with_dp(Tile& s, Tile& dp, Do do_smem, V v_smem, float softmax_scale_log2,
                                                  const RowStatistics<Tile>& row, StoreColumns store_columns = {}) {
  constexpr int kNumKSteps = 8 * Do::kChunks / 16;
  tile::gemm_nt(dp, do_smem, v_smem, [&](int k_step) {
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) {
      if (j * kNumKSteps / Tile::kColumns != k_step) continue;
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i) s.at(i, j) = probability(s.at(i, j), softmax_scale_log2, row.lse_2[i]);
      if (j % 2 == 1) store_columns(j / 2);
    }
  });
}

// Replace dP by dS = P (dP - delta) in one group of eight columns.
template <class Tile>
CUFLASH_DEVICE void score_gradient_columns(Tile& dp, Tile& p, const RowStatistics<Tile>& row, int column_tile) {
  for_each_score_by_rows<Tile>(2 * column_tile, 2 * column_tile + 2, [&](int i, int j) {
    dp.at(i, j) = score_gradient(p.at(i, j), dp.at(i, j), row.delta[i]);
  });
}

// Write the rows of a float32 gradient, which is summed over broadcast axes afterwards.
template <class Gradient>
CUFLASH_DEVICE void write_accumulators(const Matrices& to, const WorkTile& work, int head, int num_columns,
                                       Gradient& gradient) {
  const auto all = matrix<float>(to, work.batch_head, head, work.last, num_columns);
  const int first_row = work.first + gradient.first_row(), first_column = gradient.first_column();
#pragma unroll
  for (int i = 0; i < Gradient::kRows; ++i) {
    if (first_row + Gradient::row(i) >= work.last) continue;
    float* const row = &all.at(first_row + Gradient::row(i), first_column);  // columns of a workspace are contiguous
#pragma unroll
    for (int j = 0; j < Gradient::kColumns; ++j)
      if (first_column + Gradient::column(j) < num_columns) row[Gradient::column(j)] = gradient.at(i, j);
  }
}

// Write the rows of a float32 gradient to rows of several heads.
template <class Gradient>
CUFLASH_DEVICE void write_accumulators(const tile::StackedRows<float>& to, Gradient& gradient) {
#pragma unroll
  for (int i = 0; i < Gradient::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Gradient::kColumns; ++j) {
      const int row = gradient.first_row() + Gradient::row(i), column = gradient.first_column() + Gradient::column(j);
      if (row < to.num_rows && column < to.first.num_columns) to.at(row, column) = gradient.at(i, j);
    }
}

}  // namespace cuflash::attention
