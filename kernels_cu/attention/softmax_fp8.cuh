#pragma once
#include <attention/softmax_simt.cuh>
#include <tile/warp_tile.cuh>

namespace cuflash::attention {

// Online softmax whose weights are rounded to e4m3, times 2^8, of which the format holds at most 2^8.8. Scales differ from
// step to step, so that maxima are of scores times scale times log2(e). A maximum stays until it rises by more than kMaxRise.
template <int Rows>
struct QuantizedSoftmax {
  static constexpr int kRows = Rows;  // of a thread
  static constexpr float kWeightExponent = 8;
  static constexpr float kMaxRise = 0.75f;

  float row_max[kRows], row_sum[kRows];  // the sum of the thread's own columns, times 2^8

  CUFLASH_DEVICE QuantizedSoftmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = ptx::negative_infinity<float>();
      row_sum[i] = 0;
    }
  }

  // Raise maxima to those of scores where they rose by enough, and scale sums by what that takes from them. Whether any of the
  // warp's did: then o is to be scaled too. Called by whole warps.
  template <class Tile>
  CUFLASH_DEVICE bool update_max(Tile& s, const float (&scale_log2)[kRows], float (&factor)[kRows]) {
    float row_highest[kRows][4];  // four of a row, so that none waits for the other
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        row_highest[i][j % 4] = j < 4 ? s.at(i, j) : fmaxf(row_highest[i][j % 4], s.at(i, j));
    float thread_max[kRows];
    bool has_risen = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float highest = fmaxf(fmaxf(row_highest[i][0], row_highest[i][1]),
                                  fmaxf(row_highest[i][2], row_highest[i][3]));
      thread_max[i] = highest * scale_log2[i];
      has_risen |= thread_max[i] - row_max[i] > kMaxRise;  // not of -inf - (-inf)
    }
    if (!__any_sync(0xffffffffu, has_risen)) return false;  // each thread asks for its own columns: rarely any has
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      thread_max[i] = tile::quad_max(thread_max[i]);
      const float new_max = thread_max[i] - row_max[i] > kMaxRise ? thread_max[i] : row_max[i];
      factor[i] = new_max == row_max[i] ? 1 : ptx::exp2_approx(row_max[i] - new_max);
      row_max[i] = new_max;
      row_sum[i] *= factor[i];
    }
    return true;
  }

  // Turn scores into weights times 2^8, and add them up.
  template <class Tile>
  CUFLASH_DEVICE void exp_scores(Tile& s, const float (&scale_log2)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float shift = kWeightExponent - (row_max[i] == ptx::negative_infinity<float>() ? 0 : row_max[i]);
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) {
        s.at(i, j) = ptx::exp2_approx(ptx::fma(s.at(i, j), scale_log2[i], shift));
        row_sum[i] += s.at(i, j);
      }
    }
  }

  // Divide o by its row sums; `lse` is the natural log-sum-exp of rows. Rows without a key: o = 0, lse = -inf. Called by whole
  // warps.
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
};

}  // namespace cuflash::attention
