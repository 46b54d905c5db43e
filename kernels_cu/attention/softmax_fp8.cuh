#pragma once
#include <attention/softmax_simt.cuh>
#include <tile/warp_tile.cuh>

// The softmax of weights that are rounded to FP8.
namespace cuflash::attention {

// Online softmax with weights that are multiplied by 2^4 and rounded to e4m3, whose largest number is 448. Scales
// differ from step to step, so maxima are those of the scores times the scale times log2(e). A maximum stays until it
// rises by more than kMaxRise or, in steps that skip the maximum, until a thread's sum of weights in a row exceeds 448.
// The maximum may then be larger than all scores of its row, and weights smaller, but the largest weight is still at
// least 2^2.
//
// The tensor cores sum the values of several steps under one scale. If the scale of a step's values is 2^shift times
// that of the sum, the weights of the step are multiplied by 2^shift: they are 2^(4 + shift) exp(s - max). Sums of
// weights omit this factor.
template <int Rows>
struct QuantizedSoftmax {
  static constexpr int kRows = Rows;  // number of rows per thread
  static constexpr float kWeightExponent = 4;
  static constexpr float kMaxRise = 2;
  static constexpr float kLargestSum = 448;
  static constexpr float kLoweredSumExponent = 7;  // log2 of the value to which a too large sum of a thread is lowered

  float (&row_max)[kRows];  // in shared memory, since most steps read it once
  float row_sum[kRows];  // sum over the thread's own columns, times 2^4

  explicit CUFLASH_DEVICE QuantizedSoftmax(float (&row_max_storage)[kRows]) : row_max(row_max_storage) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = ptx::negative_infinity<float>();
      row_sum[i] = 0;
    }
  }

  // Update maxima that rise by more than kMaxRise, and rescale the sums of their rows. Return whether any maximum of
  // the warp has risen, so that O must be scaled too, and, if one has, whether all rows of the thread have seen a key.
  // Called by whole warps.
  enum Rise { kHasNotRisen, kHasRisen, kHasMaximum };
  template <class Tile>
  CUFLASH_DEVICE Rise update_max(Tile& s, const float (&scale_log2)[kRows], float (&factor)[kRows]) {
    float row_highest[kRows][4];  // four maxima per row, so that comparisons do not wait for each other
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        row_highest[i][j % 4] = j < 4 ? s.at(i, j) : fmaxf(row_highest[i][j % 4], s.at(i, j));
    float thread_max[kRows];
    bool has_risen = false, has_maximum = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float highest = fmaxf(fmaxf(row_highest[i][0], row_highest[i][1]),
                                  fmaxf(row_highest[i][2], row_highest[i][3]));
      thread_max[i] = highest * scale_log2[i];
      has_risen |= thread_max[i] - row_max[i] > kMaxRise;  // false for -inf - (-inf), which is NaN
    }
    if (!__any_sync(0xffffffffu, has_risen)) return kHasNotRisen;  // each thread tests its own columns; a rise is rare
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      thread_max[i] = tile::quad_max(thread_max[i]);
      const float new_max = thread_max[i] - row_max[i] > kMaxRise ? thread_max[i] : row_max[i];
      factor[i] = new_max == row_max[i] ? 1 : ptx::exp2_approx(row_max[i] - new_max);
      row_max[i] = new_max;
      row_sum[i] *= factor[i];
      has_maximum &= new_max != ptx::negative_infinity<float>();
    }
    return has_maximum ? kHasMaximum : kHasRisen;
  }

  // Replace scores by weights, and sum them.
  template <class Tile>
  CUFLASH_DEVICE void exp_scores(Tile& s, const float (&scale_log2)[kRows], float shift, float unshift) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = 0;
      exp_row(s, i, scale_log2[i], row_max[i] == ptx::negative_infinity<float>() ? 0 : row_shift(i, shift), sum);
      row_sum[i] = ptx::fma(sum, unshift, row_sum[i]);
    }
  }

  // Replace scores by weights under the old maxima, which all rows must have, and round the weights into p. A weight is
  // 2 to the power of a score times `scale_log2` plus `row_shift`; `sum` is the sum of the thread's weights.
  // `meanwhile` is called before p is written. Return false if a sum is so large that one of the weights may be too
  // large. Called by whole warps.
  template <class Tile, class Meanwhile, class P>
  CUFLASH_DEVICE bool try_exp_with_stale_max(Tile& s, const float (&scale_log2)[kRows], const float (&row_shift)[kRows],
                                             float (&sum)[kRows], Meanwhile meanwhile, P& p) {
    bool is_small = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum[i] = 0;
    constexpr int kGroups = P::kNumFragments, kFirst = kGroups / 2;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group == kFirst) {  // the vote keeps later instructions from moving ahead of it
#pragma unroll
        for (int i = 0; i < kRows; ++i) is_small &= sum[i] <= kLargestSum;
        is_small = __all_sync(0xffffffffu, is_small);
        meanwhile();
      }
      if (group >= kFirst) p.pack(s, group - kFirst);
      constexpr int kColumns = Tile::kColumns / kGroups;
#pragma unroll
      for (int j = group * kColumns; j < (group + 1) * kColumns; ++j)
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          s.at(i, j) = ptx::exp2_approx(ptx::fma(s.at(i, j), scale_log2[i], row_shift[i]));
          sum[i] += s.at(i, j);
        }
    }
#pragma unroll
    for (int group = kGroups - kFirst; group < kGroups; ++group) p.pack(s, group);
#pragma unroll
    for (int i = 0; i < kRows; ++i) is_small &= sum[i] <= kLargestSum;  // false if the sum is NaN
    return __all_sync(0xffffffffu, is_small);
  }
  CUFLASH_DEVICE float row_shift(int i, float shift) const { return kWeightExponent + shift - row_max[i]; }

  // Add the thread's sum of weights to the sums of its rows.
  CUFLASH_DEVICE void add_sums(const float (&sum)[kRows], float unshift) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_sum[i] = ptx::fma(sum[i], unshift, row_sum[i]);
  }

  // Raise maxima so that no sum of weights is too large, and sum the weights; sums and weights are scaled by `factor`.
  // Return false, and change nothing, if weights are infinite: the scores must then be computed again. Called by whole
  // warps.
  template <class Tile>
  CUFLASH_DEVICE bool lower_weights(Tile& s, float unshift, float (&sum)[kRows], float (&factor)[kRows]) {
    float largest[kRows];
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = tile::quad_max(sum[i]);
      is_finite &= sum[i] < -ptx::negative_infinity<float>();  // false if the sum is NaN
    }
    if (!__all_sync(0xffffffffu, is_finite)) return false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float rise = largest[i] > kLargestSum ? log2f(largest[i]) - kLoweredSumExponent : 0;
      factor[i] = ptx::exp2_approx(-rise);
      row_max[i] += rise;
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) s.at(i, j) *= factor[i];
      row_sum[i] = factor[i] * ptx::fma(sum[i], unshift, row_sum[i]);
    }
    return true;
  }

  // Divide o by its row sums, and compute the natural log-sum-exp of the rows. Rows without a key have o = 0 and lse =
  // -inf. Called by whole warps.
  template <class OutputTile>
  CUFLASH_DEVICE void finalize(OutputTile& o, float (&lse)[kRows]) const {
    float sum[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum[i] = tile::quad_sum(row_sum[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_empty = row_max[i] == ptx::negative_infinity<float>() && sum[i] == 0;
      const float divisor = is_empty ? 1 : sum[i];
      o.scale_row(i, ptx::reciprocal_approx(divisor));
      lse[i] = ptx::fma(row_max[i] - kWeightExponent, static_cast<float>(kLn2), ptx::log_accurate(divisor));
    }
  }

 private:
  template <class Tile>
  static CUFLASH_DEVICE void exp_row(Tile& s, int i, float scale_log2, float shift, float& sum) {
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) {
      s.at(i, j) = ptx::exp2_approx(ptx::fma(s.at(i, j), scale_log2, shift));
      sum += s.at(i, j);
    }
  }
};

}  // namespace cuflash::attention
