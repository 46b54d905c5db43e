#pragma once
#include <tile/element.cuh>
#include <tile/register_tile.cuh>

// The online softmax of simt kernels.
namespace cuflash::attention {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

// Running maximum and sum of a tile's rows (FlashAttention-2, arXiv 2307.08691, algorithm 1), in base 2: scores are
// multiplied by log2(e) first, so that their exp2 is the exp of the paper. A thread holds the sum of its own columns.
template <class T, int Rows>
struct OnlineSoftmax {
  static constexpr int kRows = tile::kRowsPerThread<Rows>;
  T row_max[kRows], row_sum[kRows];

  CUFLASH_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = ptx::negative_infinity<T>();
      row_sum[i] = 0;
    }
  }

  // Replace scores by exp2(s - row_max), and rescale earlier sums for the new maximum. Called by all threads; those of
  // a row share its maximum.
  template <int Columns, int ValueColumns, int Run>
  CUFLASH_DEVICE void update(tile::RegisterTile<T, Rows, Columns>& s,
                             tile::RegisterTile<T, Rows, ValueColumns, Run>& o) {
    using Scores = tile::RegisterTile<T, Rows, Columns>;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T highest = row_max[i];
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) highest = tile::maximum(highest, s.at[i][j]);
      highest = tile::row_max(highest);
      const T shift = tile::maximum(highest, tile::lowest<T>());  // avoids -inf - (-inf), which is NaN
      const T rescale = ptx::exp2_accurate(row_max[i] - shift);
      T sum = 0;
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {
        s.at[i][j] = ptx::exp2_accurate(s.at[i][j] - shift);
        sum += s.at[i][j];
      }
      row_max[i] = highest;
      row_sum[i] = row_sum[i] * rescale + sum;
      o.scale_row(i, rescale);
    }
  }

  // Divide o by its row sums, and return the natural log-sum-exp of row i. Rows without a key have o = 0 and lse =
  // -inf. Called by all threads, once for every i.
  template <int ValueColumns, int Run>
  CUFLASH_DEVICE T finalize(int i, tile::RegisterTile<T, Rows, ValueColumns, Run>& o) const {
    const T sum = tile::row_sum(row_sum[i]);
    const bool is_empty = row_max[i] == ptx::negative_infinity<T>() && sum == 0;
    const T divisor = is_empty ? T(1) : sum;
    o.divide_row(i, divisor);
    return ptx::fma(row_max[i], T(kLn2), ptx::log_accurate(divisor));
  }
};

}  // namespace cuflash::attention
