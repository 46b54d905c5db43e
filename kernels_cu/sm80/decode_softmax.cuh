#pragma once
#include <sm80/decode_tiles.cuh>

// The online softmax of each warp of a decode kernel (sm80/decode.cuh), and the maximum of all warps.
namespace cuflash::sm80 {

// Running maximum and sum of a thread's rows, in units of q k^T. They depend only on the row's own scores.
struct RowStats {
  float max[Scores::kRows], sum[Scores::kRows];

  static CUFLASH_DEVICE float shift(float max) { return max == ptx::negative_infinity<float>() ? 0 : max; }
  static CUFLASH_DEVICE float weight(float max, float to, float softmax_scale_log2) {
    return ptx::exp2_approx((max - shift(to)) * softmax_scale_log2);
  }

  // Replace scores by weights, and rescale the sums and O of earlier steps for the new maximum. The lower eight rows of
  // the tile are skipped if no query is in them.
  CUFLASH_DEVICE void update(Scores& s, Output& o, float softmax_scale_log2, bool has_lower_rows) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      if (i % 2 == 1 && !has_lower_rows) continue;
      float highest = max[i];
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) highest = fmaxf(highest, s.at(i, j));
      highest = tile::quad_max(highest);
      const float factor = weight(max[i], highest, softmax_scale_log2);
      max[i] = highest;
      float step = 0;
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {
        s.at(i, j) = weight(s.at(i, j), highest, softmax_scale_log2);
        step += s.at(i, j);
      }
      sum[i] = sum[i] * factor + step;
      if (__any_sync(0xffffffffu, factor != 1)) o.scale_row(i, factor);  // after the first steps, maxima rarely rise
    }
  }
};

// Bring o of the warps that divide the keys among themselves to the maximum of all of them. Each warp receives the
// maximum and the sum of all. Called by all threads.
CUFLASH_DEVICE void bring_to_one_maximum(RowStats& stats, Output& o, tile::Float2* room, float softmax_scale_log2) {
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const float sum = tile::quad_sum(stats.sum[i]);
    if (o.first_column() == 0) room[key_group() * kBlockQ + o.first_row() + o.row(i)] = {{stats.max[i], sum}};
  }
  __syncthreads();  // all warps have stored their maxima and sums
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const tile::Float2* const of_row = room + o.first_row() + o.row(i);
    float highest = of_row[0].at[0], sum = 0;
#pragma unroll
    for (int group = 1; group < kKeyGroups; ++group) highest = fmaxf(highest, of_row[group * kBlockQ].at[0]);
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group)
      sum = ptx::fma(RowStats::weight(of_row[group * kBlockQ].at[0], highest, softmax_scale_log2),
                     of_row[group * kBlockQ].at[1], sum);
    const float factor = RowStats::weight(stats.max[i], highest, softmax_scale_log2);
#pragma unroll
    for (int j = 0; j < Output::kColumns; ++j)
      o.at(i, j) = ptx::fma(o.at(i, j), factor, 0.0f);  // rounded here in every kernel, never fused with a later sum
    stats.max[i] = highest;
    stats.sum[i] = sum;
  }
}

}  // namespace cuflash::sm80
