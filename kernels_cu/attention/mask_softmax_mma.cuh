#pragma once
#include <attention/block_iterator.cuh>
#include <attention/softmax_simt.cuh>
#include <tile/warp_tile.cuh>

// Masks and softmax on scores in the accumulator layout of tensor cores.
namespace cuflash::attention {

// Return whether a step needs no mask.
template <int Width>
CUFLASH_DEVICE bool is_unmasked(const KvBlock& block) {
  return block.kind == BlockKind::kFull && block.stop - block.start == Width;
}

// Maps from a row of a tile to its query, for tiles of one head and for tiles of all heads that share keys (pack_gqa).
struct UnpackedQuery {
  CUFLASH_DEVICE int operator()(int row) const { return row; }
};
struct PackedQuery {
  int seqlen_q;
  CUFLASH_DEVICE int operator()(int row) const { return row % seqlen_q; }
};

// The value that marks masked scores in backward passes: a NaN that no arithmetic produces, recognized by its bits.
// -inf cannot mark them, since a score can be -inf.
constexpr uint32_t kMaskedScore = 0x7fc5a5a5u;
CUFLASH_DEVICE float masked_score() { return __uint_as_float(kMaskedScore); }
CUFLASH_DEVICE bool is_masked_score(float s) { return __float_as_uint(s) == kMaskedScore; }

// Set the scores of a step that are masked or past the end of the step to a value. `row_mask_of` returns the mask of a
// row of the tile. A thread's columns ascend, so the columns before a key are its first ones, and the mask of a row
// needs one bit per column. A step starts at a whole byte of the mask's bits, since the widths of steps are multiples
// of 8.
template <bool HasBits, class Tile, class RowMaskOf>
CUFLASH_DEVICE void mask_rows(Tile& s, const KvBlock& block, float value, RowMaskOf row_mask_of) {
  constexpr int kWords = (Tile::kColumns + 31) / 32;
  const int first_row = Tile::first_row(), first_key = block.start + Tile::first_column();
  const int num_keys = block.stop - first_key;
  const auto columns_before = [](int key) { return key <= 0 ? 0 : key / 8 * 2 + min(key % 8, 2); };
  const auto low_bits = [](int count) { return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1; };
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const RowMask row_mask = row_mask_of(first_row + Tile::row(i));
    const int lo = columns_before(row_mask.lo - first_key), hi = columns_before(min(row_mask.hi - first_key, num_keys));
    uint32_t words[kWords];
#pragma unroll
    for (int x = 0; x < kWords; ++x) words[x] = low_bits(hi - 32 * x) & ~low_bits(lo - 32 * x);
    if (HasBits && row_mask.bits != nullptr) {
      const uint8_t* const bits = row_mask.bits + (first_key - row_mask.first_bit_key) / 8;
#pragma unroll
      for (int j = 0; j < Tile::kColumns; j += 2)
        if (Tile::column(j) < num_keys)
          words[j / 32] &= static_cast<uint32_t>(bits[j / 2] >> Tile::first_column() % 8) << j % 32 | ~(3u << j % 32);
    }
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      if (!(words[j / 32] >> j % 32 & 1)) s.at(i, j) = value;
  }
}

// Set the masked scores of a band to a value. In a band, each row attends one key further than the row before it.
// `keys` is the interval of the tile's first row. Keys before `start` are masked too.
template <class Tile>
CUFLASH_DEVICE void mask_band(Tile& s, const KvBlock& block, float value, const Interval& keys, int start) {
  static_assert(Tile::kColumns <= 32 && Tile::row(1) == 8 && Tile::column(2) == 8,
                "a thread's next row attends two more of its columns");
  const int first_key = block.start + Tile::first_column(), row = Tile::first_row();
  const auto columns_before = [&](int key) { return (key - first_key >> 3) * 2 + min(key - first_key & 7, 2); };
  const int first = columns_before(start), last = columns_before(block.stop);
  const int lo = columns_before(keys.lo + row), hi = columns_before(keys.hi + row);
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const uint32_t visible =
        ptx::bits_at_or_above(max(lo + 2 * i, first)) & ~ptx::bits_at_or_above(min(hi + 2 * i, last));
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      if (!(visible >> j & 1)) s.at(i, j) = value;
  }
}

// Return the keys that a row of a tile attends in a step; a row past the last one attends none.
template <class Queries = UnpackedQuery>
CUFLASH_DEVICE RowMask row_mask_of_row(const Params& params, const WorkTile& work, const KvBlock& block, int row,
                                       Queries query_of = {}) {
  const int query = work.first + row;
  ptx::compiler_barrier();
  RowMask row_mask = block.row_mask(params, work.batch_head, query_of(min(query, work.last - 1)));
  if (query >= work.last) row_mask.hi = 0;
  return row_mask;
}

// Set the masked scores of a step to a value.
template <bool HasBits, class Tile, class Queries = UnpackedQuery>
CUFLASH_DEVICE void mask_scores(Tile& s, const Params& params, const WorkTile& work, const KvBlock& block, float value,
                                Queries query_of = {}) {
  mask_rows<HasBits>(s, block, value, [&](int row) { return row_mask_of_row(params, work, block, row, query_of); });
}

// Running maximum and sum of a warp's rows (FlashAttention-2, arXiv 2307.08691, algorithm 1). Scores are the products q
// k^T; the exponent applies the scale times log2(e). Rescaling is lazy: a row keeps its maximum until the new one would
// scale P by more than 2^8 (2^14 in a step that skips the maximum). Thus P stays below float16's limit of 65504, and O
// is rarely rescaled.
template <int Rows>
struct LazySoftmax {
  static constexpr int kRows = Rows;  // number of rows per thread
  static constexpr float kMaxRise = 8;
  static constexpr float kMaxRowSum = 1 << 14;  // upper limit of a thread's sum of weights in a row of one step
  // above it, the rounding error of the scaled score would affect digits of O
  static constexpr float kLargestPlainScore = 1 << 14;

  float row_max[kRows], row_sum[kRows];  // row_sum covers the thread's own columns
  // Reasons why a step must compute maxima. kNoKeyYet: some of the warp's queries have not attended any key yet.
  // kLargeMax: a maximum is so large that its rounding error after scaling would be a large exponent.
  enum MaxReason { kNoKeyYet = 1, kLargeMax = 2 };
  int max_reasons = kNoKeyYet;

  CUFLASH_DEVICE LazySoftmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = ptx::negative_infinity<float>();
      row_sum[i] = 0;
    }
  }

  // Return the absolute value of the scale times log2(e), or 1 if the scale is 0.
  static CUFLASH_DEVICE float scale_log2(double softmax_scale) {
    const float scale = softmax_scale * kLog2E;
    return scale == 0 ? 1 : fabsf(scale);
  }

  // Return whether q k^T must be negated so that weights grow with it, because the scale is not positive. The test
  // compares the bits of the double: double arithmetic would wait for the products that the tensor cores have started.
  static CUFLASH_DEVICE bool needs_negation(double softmax_scale) { return __double_as_longlong(softmax_scale) <= 0; }

  template <class Tile>
  static CUFLASH_DEVICE void negate(Tile& s, double softmax_scale) {
    const auto bits = static_cast<unsigned long long>(__double_as_longlong(softmax_scale));
    s.scale(bits << 1 == 0 ? 0 : -1);
  }

  // Replace scores by weights under the old maxima, and sum the weights. Return false, with the scores overwritten, if
  // a thread's sum exceeds kMaxRowSum: then a weight may be too large for float16, and some maximum has risen by more
  // than kMaxRise. Called by whole warps.
  template <class Tile>
  CUFLASH_DEVICE bool try_exp_with_stale_max(Tile& s, float softmax_scale_log2) {
    static_assert(kMaxRowSum / Tile::kColumns >= 1 << static_cast<int>(kMaxRise),
                  "a sum above kMaxRowSum has a weight that raises its maximum");
    float sum[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) exp_row(s, i, softmax_scale_log2, shift(i) * softmax_scale_log2, sum[i]);
    bool is_small = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) is_small &= sum[i] <= kMaxRowSum;  // false if the sum is NaN
    if (__any_sync(0xffffffffu, !is_small)) return false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_sum[i] += sum[i];
    return true;
  }

  // Update maxima that rise by more than kMaxRise, and rescale the sums of their rows. Return whether any maximum of
  // the warp has risen; if so, O must be scaled by `factor` too. Called by whole warps.
  template <class Tile>
  CUFLASH_DEVICE bool update_max(Tile& s, float softmax_scale_log2, float (&factor)[kRows]) {
    // four maxima per row, so that comparisons do not wait for each other
    float row_highest[kRows][4], thread_max[kRows], new_max[kRows];
    const auto has_risen_enough = [&](int i, float to) {  // false for -inf - (-inf), which is NaN
      return (to - row_max[i]) * softmax_scale_log2 > kMaxRise;
    };
    bool max_has_risen = false, has_no_key = false, is_large = max_reasons & kLargeMax;
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        row_highest[i][j % 4] = j < 4 ? s.at(i, j) : fmaxf(row_highest[i][j % 4], s.at(i, j));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      thread_max[i] = fmaxf(fmaxf(row_highest[i][0], row_highest[i][1]), fmaxf(row_highest[i][2], row_highest[i][3]));
      max_has_risen |= has_risen_enough(i, thread_max[i]);
    }
    if (!__any_sync(0xffffffffu, max_has_risen)) return false;  // a thread tests only its own columns; rises are rare
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      thread_max[i] = tile::quad_max(thread_max[i]);
      new_max[i] = has_risen_enough(i, thread_max[i]) ? thread_max[i] : row_max[i];
      factor[i] = new_max[i] == row_max[i] ? 1 : ptx::exp2_approx((row_max[i] - new_max[i]) * softmax_scale_log2);
      row_max[i] = new_max[i];
      row_sum[i] *= factor[i];
      const bool has_key = row_max[i] != ptx::negative_infinity<float>();
      is_large |= has_key && fabsf(row_max[i]) * softmax_scale_log2 > kLargestPlainScore;
      has_no_key |= !has_key;
    }
    max_reasons = kLargeMax * __any_sync(0xffffffffu, is_large) + kNoKeyYet * __any_sync(0xffffffffu, has_no_key);
    return true;
  }

  template <class OutputTile>
  static CUFLASH_DEVICE void rescale(OutputTile& o, const float (&factor)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) o.scale_row(i, factor[i]);
  }

  // Subtract large maxima from the scores before the scores are scaled.
  template <class Tile>
  CUFLASH_DEVICE void subtract_max(Tile& s) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) s.at(i, j) -= shift(i);
  }

  // Replace scores, from which large maxima were subtracted, by weights, and sum them.
  template <class Tile>
  CUFLASH_DEVICE void exp_scores(Tile& s, float softmax_scale_log2) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      exp_row(s, i, softmax_scale_log2, max_reasons & kLargeMax ? 0 : shift(i) * softmax_scale_log2, row_sum[i]);
  }

  // Replace scores by weights, and rescale the sums and O of earlier steps for the new maxima.
  template <class Tile, class OutputTile>
  CUFLASH_DEVICE void update(Tile& s, OutputTile& o, float softmax_scale_log2) {
    float factor[kRows];
    if (update_max(s, softmax_scale_log2, factor)) rescale(o, factor);
    if (max_reasons & kLargeMax) subtract_max(s);
    exp_scores(s, softmax_scale_log2);
  }

  // Divide o by its row sums, and compute the natural log-sum-exp of the rows. Rows without a key have o = 0 and lse =
  // -inf. All rows are computed at once, so that none waits for another. Multiplications and additions are explicit
  // instructions, so that all call sites in a kernel round identically. Called by whole warps.
  template <class OutputTile>
  CUFLASH_DEVICE void finalize(OutputTile& o, float softmax_scale_log2, float (&lse)[kRows]) const {
    float sum[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum[i] = tile::quad_sum(row_sum[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_empty = row_max[i] == ptx::negative_infinity<float>() && sum[i] == 0;
      const float divisor = is_empty ? 1 : sum[i];  // log2(1) = 0 leaves lse at the maximum
      o.scale_row(i, ptx::reciprocal_approx(divisor));
      lse[i] = ptx::fma(row_max[i], softmax_scale_log2 * static_cast<float>(kLn2), ptx::log_accurate(divisor));
    }
  }

 private:
  template <class Tile>
  static CUFLASH_DEVICE void exp_row(Tile& s, int i, float softmax_scale_log2, float offset, float& sum) {
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) {
      s.at(i, j) = ptx::exp2_approx(ptx::fma(s.at(i, j), softmax_scale_log2, -offset));
      sum += s.at(i, j);
    }
  }

  CUFLASH_DEVICE float shift(int i) const { return row_max[i] == ptx::negative_infinity<float>() ? 0 : row_max[i]; }
};

}  // namespace cuflash::attention
