#pragma once
#include <attention/online_softmax.cuh>
#include <attention/steps.cuh>
#include <tile/warp_tile.cuh>

// Masks and softmax on scores as the tensor cores leave them.
namespace cuflash::attention {

// Whether a step needs no mask.
template <int Width>
CUFLASH_DEVICE bool is_whole(const Step& step) {
  return step.kind == Kind::kFull && step.stop - step.start == Width;
}

// Which query a row of a tile is.
struct EachItsOwn {
  CUFLASH_DEVICE int operator()(int row) const { return row; }
};
struct HeadAfterHead {
  int seqlen_q;
  CUFLASH_DEVICE int operator()(int row) const { return row % seqlen_q; }
};

// A gradient's masked scores: a NaN that no arithmetic makes, told by its bits from every score, of which -inf is one too.
constexpr uint32_t kMaskedScore = 0x7fc5a5a5u;
CUFLASH_DEVICE float masked_score() { return __uint_as_float(kMaskedScore); }
CUFLASH_DEVICE bool is_masked_score(float s) { return __float_as_uint(s) == kMaskedScore; }

// Set scores that a warp's queries may not see in a step to a value: keys past the step's end, and those that `seen_by` of a
// row of the tile leaves out. Columns of a thread rise, so that those before a key are the first of them, and what a row
// sees is a bit a column. Bits of a step start with a byte, since steps are as wide as whole bytes.
template <bool HasBits, class Tile, class SeenBy>
CUFLASH_DEVICE void mask_rows(Tile& s, const Step& step, float value, SeenBy seen_by) {
  constexpr int kWords = (Tile::kColumns + 31) / 32;
  const int first_row = Tile::first_row(), first_key = step.start + Tile::first_column();
  const int num_keys = step.stop - first_key;
  const auto columns_before = [](int key) { return key <= 0 ? 0 : key / 8 * 2 + min(key % 8, 2); };
  const auto first_bits = [](int count) { return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1; };
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const Seen seen = seen_by(first_row + Tile::row(i));
    const int lo = columns_before(seen.lo - first_key), hi = columns_before(min(seen.hi - first_key, num_keys));
    uint32_t words[kWords];
#pragma unroll
    for (int x = 0; x < kWords; ++x) words[x] = first_bits(hi - 32 * x) & ~first_bits(lo - 32 * x);
    if (HasBits && seen.bits != nullptr) {
      const uint8_t* const bits = seen.bits + (first_key - seen.first_key) / 8;
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

// The same where each row sees one key further than the row before: the tile's first one what `keys` says. Of the step, keys
// from `start` on.
template <class Tile>
CUFLASH_DEVICE void mask_band(Tile& s, const Step& step, float value, const Interval& keys, int start) {
  static_assert(Tile::kColumns <= 32 && Tile::row(1) == 8 && Tile::column(2) == 8, "a thread's next row: two columns on");
  const int first_key = step.start + Tile::first_column(), row = Tile::first_row();
  const auto columns_before = [&](int key) { return (key - first_key >> 3) * 2 + min(key - first_key & 7, 2); };
  const int first = columns_before(start), last = columns_before(step.stop);
  const int lo = columns_before(keys.lo + row), hi = columns_before(keys.hi + row);
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const uint32_t seen = ptx::bits_from(max(lo + 2 * i, first)) & ~ptx::bits_from(min(hi + 2 * i, last));
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      if (!(seen >> j & 1)) s.at(i, j) = value;
  }
}

// What a row of a tile sees in a step; one past its last, nothing.
template <class Queries = EachItsOwn>
CUFLASH_DEVICE Seen seen_by_row(const Params& params, const WorkTile& work, const Step& step, int row,
                                Queries query_of = {}) {
  const int query = work.first + row;
  ptx::keep_loads_apart();
  Seen seen = step.seen(params, work.place, query_of(min(query, work.last - 1)));
  if (query >= work.last) seen.hi = 0;
  return seen;
}

template <bool HasBits, class Tile, class Queries = EachItsOwn>
CUFLASH_DEVICE void mask_scores(Tile& s, const Params& params, const WorkTile& work, const Step& step, float value,
                                Queries query_of = {}) {
  mask_rows<HasBits>(s, step, value, [&](int row) { return seen_by_row(params, work, step, row, query_of); });
}

// The running maximum and sum of a warp's rows (FlashAttention-2, arXiv 2307.08691, algorithm 1). Scores come as they
// left the product: the scale, times log2(e), is part of the exponent. A maximum stays as it is until it rises by more
// than 2^8 in the weights, so that o is rarely rescaled, or 2^14 where nobody looks; which float16 holds, as P.
template <int Rows>
struct LazySoftmax {
  static constexpr int kRows = Rows;  // of a thread
  static constexpr float kMostRise = 8;
  static constexpr float kMostSum = 1 << 14;  // of a thread's weights in a row of a step
  static constexpr float kLargest = 1 << 14;  // of a score whose rounding changes no digit that o has

  float row_max[kRows], row_sum[kRows];  // the sum of the thread's own columns
  // Why a step must look for maxima: some of the warp's queries have seen no key yet, or some maxima are so large that what
  // rounds in a score times the scale would be a large exponent.
  enum Reason { kSeesNone = 1, kIsLarge = 2 };
  int reasons = kSeesNone;

  CUFLASH_DEVICE LazySoftmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = ptx::negative_infinity<float>();
      row_sum[i] = 0;
    }
  }

  // The scale times log2(e), without its sign, and 1 in the place of 0.
  static CUFLASH_DEVICE float scale_log2(double softmax_scale) {
    const float scale = softmax_scale * kLog2E;
    return scale == 0 ? 1 : fabsf(scale);
  }

  // Whether q k^T has to be turned into what grows with the scores: the scale is not positive. Doubles are compared by
  // their bits, as the unit for their arithmetic waits for products of tensor cores that were started before.
  static CUFLASH_DEVICE bool turns(double softmax_scale) { return __double_as_longlong(softmax_scale) <= 0; }

  template <class Tile>
  static CUFLASH_DEVICE void turn(Tile& s, double softmax_scale) {
    const auto bits = static_cast<unsigned long long>(__double_as_longlong(softmax_scale));
    s.scale(bits << 1 == 0 ? 0 : -1);
  }

  // Turn scores into weights under the maxima as they are, where none must be looked for, and add them up. False, and scores
  // are lost, where a thread's weights sum up to so much that one of them may be too large, and some maximum has risen by
  // enough. Called by whole warps.
  template <class Tile>
  CUFLASH_DEVICE bool weigh_unseen(Tile& s, float softmax_scale_log2) {
    static_assert(kMostSum / Tile::kColumns >= 1 << static_cast<int>(kMostRise), "else maxima do not rise, again and again");
    float sum[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) weigh_row(s, i, softmax_scale_log2, shift(i) * softmax_scale_log2, sum[i]);
    bool is_small = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) is_small &= sum[i] <= kMostSum;  // false of NaN
    if (__any_sync(0xffffffffu, !is_small)) return false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_sum[i] += sum[i];
    return true;
  }

  // Raise maxima to those of scores where they rose by enough, and scale sums by what that takes from them. Whether any
  // of the warp's did: then o is to be scaled too. Called by whole warps.
  template <class Tile>
  CUFLASH_DEVICE bool raise(Tile& s, float softmax_scale_log2, float (&by)[kRows]) {
    float highest[kRows][4], most[kRows], risen[kRows];  // four of a row, so that none waits for the other
    const auto is_risen = [&](int i, float to) {  // not of -inf - (-inf)
      return (to - row_max[i]) * softmax_scale_log2 > kMostRise;
    };
    bool has_risen = false, sees_none = false, is_large = reasons & kIsLarge;
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
#pragma unroll
      for (int i = 0; i < kRows; ++i) highest[i][j % 4] = j < 4 ? s.at(i, j) : fmaxf(highest[i][j % 4], s.at(i, j));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      most[i] = fmaxf(fmaxf(highest[i][0], highest[i][1]), fmaxf(highest[i][2], highest[i][3]));
      has_risen |= is_risen(i, most[i]);
    }
    if (!__any_sync(0xffffffffu, has_risen)) return false;  // each thread asks for its own columns: rarely any has
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      most[i] = tile::quad_max(most[i]);
      risen[i] = is_risen(i, most[i]) ? most[i] : row_max[i];
      by[i] = risen[i] == row_max[i] ? 1 : ptx::exp2_approx((row_max[i] - risen[i]) * softmax_scale_log2);
      row_max[i] = risen[i];
      row_sum[i] *= by[i];
      const bool has_seen = row_max[i] != ptx::negative_infinity<float>();
      is_large |= has_seen && fabsf(row_max[i]) * softmax_scale_log2 > kLargest;
      sees_none |= !has_seen;
    }
    reasons = kIsLarge * __any_sync(0xffffffffu, is_large) + kSeesNone * __any_sync(0xffffffffu, sees_none);
    return true;
  }

  template <class OutputTile>
  static CUFLASH_DEVICE void rescale(OutputTile& o, const float (&by)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) o.scale_row(i, by[i]);
  }

  // Of large maxima, take them off the scores before these are scaled.
  template <class Tile>
  CUFLASH_DEVICE void take_off(Tile& s) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) s.at(i, j) -= shift(i);
  }

  // Turn scores, from which large maxima are taken off, into weights, and add them up.
  template <class Tile>
  CUFLASH_DEVICE void weigh(Tile& s, float softmax_scale_log2) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      weigh_row(s, i, softmax_scale_log2, reasons & kIsLarge ? 0 : shift(i) * softmax_scale_log2, row_sum[i]);
  }

  // All of it: scores become weights, and what has been summed before is scaled by what the maximum rose.
  template <class Tile, class OutputTile>
  CUFLASH_DEVICE void update(Tile& s, OutputTile& o, float softmax_scale_log2) {
    float by[kRows];
    if (raise(s, softmax_scale_log2, by)) rescale(o, by);
    if (reasons & kIsLarge) take_off(s);
    weigh(s, softmax_scale_log2);
  }

  // Divide o by its row sums; `lse` is the natural log-sum-exp of rows. Rows without a key: o = 0, lse = -inf. All
  // rows at once, so that none waits for another. A kernel may do this in two places: no product is left to the compiler to
  // round or not. Called by whole warps.
  template <class OutputTile>
  CUFLASH_DEVICE void finalize(OutputTile& o, float softmax_scale_log2, float (&lse)[kRows]) const {
    float sum[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum[i] = tile::quad_sum(row_sum[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_empty = row_max[i] == ptx::negative_infinity<float>() && sum[i] == 0;
      const float divisor = is_empty ? 1 : sum[i];  // log 1 leaves lse at the maximum
      o.scale_row(i, ptx::reciprocal_approx(divisor));
      lse[i] = ptx::fma(row_max[i], softmax_scale_log2 * static_cast<float>(kLn2), ptx::log_accurate(divisor));
    }
  }

 private:
  template <class Tile>
  static CUFLASH_DEVICE void weigh_row(Tile& s, int i, float softmax_scale_log2, float rest, float& sum) {
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) {
      s.at(i, j) = ptx::exp2_approx(ptx::fma(s.at(i, j), softmax_scale_log2, -rest));
      sum += s.at(i, j);
    }
  }

  CUFLASH_DEVICE float shift(int i) const { return row_max[i] == ptx::negative_infinity<float>() ? 0 : row_max[i]; }
};

}  // namespace cuflash::attention
