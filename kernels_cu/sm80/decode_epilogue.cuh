#pragma once
#include <attention/sink.cuh>
#include <ptx/arrival.cuh>
#include <sm80/decode_softmax.cuh>

// Merges the results of a decode kernel (sm80/decode.cuh): those of the warps that divide a part's keys, and then those
// of a sequence's parts, which the block that ends last merges.
namespace cuflash::sm80 {

using Vector = tile::Vector<float>;

// A summand of rows: its maxima and sums, and its o. The next summand's follow `rows` rows later.
struct Summands {
  const tile::Float2* stats;
  const float* o;
  int rows;
};

// The sum of a row's summands: the row's maximum and sum, and a thread's part of o, which is four of each 128 columns.
struct RowSum {
  static constexpr int kVectors = (kValueDim + 127) / 128;

  float max = ptx::negative_infinity<float>(), sum = 0;
  Vector o[kVectors]{};

  static CUFLASH_DEVICE int column(int vector) { return 128 * vector + 4 * ptx::lane(); }
  // Add summands of a row in order, kPartsAtOnce at a time; each thread computes the weight of one of them. Called by
  // whole warps.
  CUFLASH_DEVICE void add(const Summands& of, int row, int num_summands, float softmax_scale_log2) {
#pragma unroll 1  // keeps the code small
    for (int first = 0; first < num_summands; first += kPartsAtOnce) {
      const int num = min(kPartsAtOnce, num_summands - first), own = ptx::lane() % kPartsAtOnce;
      tile::Float2 stats{{ptx::negative_infinity<float>(), 0}};
      if (own < num) stats = of.stats[(first + own) * of.rows + row];
      const float* from = of.o + static_cast<int64_t>(first * of.rows + row) * kValueDim + column(0);
      Vector summands[kPartsAtOnce][kVectors]{};  // loaded before their weights are known
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i, from += of.rows * kValueDim)
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          if (i < num && column(v) < kValueDim) summands[i][v] = *reinterpret_cast<const Vector*>(from + 128 * v);
      const float highest = fmaxf(max, tile::lane_max<kPartsAtOnce>(stats.at[0]));
      const float weight = RowStats::weight(stats.at[0], highest, softmax_scale_log2);
      scale(RowStats::weight(max, highest, softmax_scale_log2));
      max = highest;
      sum += tile::lane_sum<kPartsAtOnce>(stats.at[1] * weight);
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float of_summand = __shfl_sync(0xffffffffu, weight, i);
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[v].at[e] += of_summand * summands[i][v].at[e];
      }
    }
  }
  // Divide o by the sum, and write it and lse as results of a row. Called by whole warps.
  CUFLASH_DEVICE void write(const Decode& params, const attention::BatchHead& heads, int row, float softmax_scale_log2,
                            attention::SinkArgument<Config> sink) const {
    using namespace attention;
    const DivMod at = divmod(row, params.num_queries);
    const int head = heads.head + at.quotient, query = at.remainder;
    float lse = max, factor = 0;
    if (max != ptx::negative_infinity<float>() || sum != 0) {
      lse = ptx::fma(max, softmax_scale_log2 * static_cast<float>(kLn2), ptx::log_accurate(sum));
      factor = 1 / sum;
    }
    if constexpr (Config::kHasSink) factor *= merge_sink(lse, sink_logit<float>(sink, heads, head));
    if (ptx::lane() == 0) matrix<float>(params.lse, heads, head, params.num_queries, 1).at(query, 0) = lse;
    const auto to = matrix<Element>(params.o, heads, head, params.num_queries, params.cache.value_dim);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column(v) + e < params.cache.value_dim) tile::to_element(o[v].at[e] * factor, to.at(query, column(v) + e));
  }

 private:
  CUFLASH_DEVICE void scale(float factor) {
    sum *= factor;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[v].at[e] *= factor;
  }
};

// Add o of the warps that divide the keys among themselves, in pairs; the warps of the first keys receive the sums.
// Called by all threads.
CUFLASH_DEVICE void add_pairs(Output& o, float* sums) {
  using Layout = tile::AccumulatorLayout<Output, 4>;
  const int own_group = key_group(), row_group = threadIdx.x / 32 % kRowGroups;
#pragma unroll
  for (int half = kKeyGroups / 2; half > 0; half /= 2) {
    float* const room = sums + (own_group % half * kRowGroups + row_group) * kFloatsOfWarp + 4 * ptx::lane();
    if (own_group >= half && own_group < 2 * half) Layout::store_shared(room, o);
    __syncthreads();  // the summands are stored
    if (own_group < half) Layout::add_shared(room, o, 0, Output::kColumnTiles);
    __syncthreads();  // all threads have read the summands
  }
}

// Return the sum of four columns of a row, in the order of `add_pairs`. `summands` are those of the first keys.
CUFLASH_DEVICE Vector sum_of_pairs(const float* summands) {
  Vector x[kKeyGroups];
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group)
    x[group] = *reinterpret_cast<const Vector*>(summands + group * 16 * kRowFloats);
#pragma unroll
  for (int half = kKeyGroups / 2; half > 0; half /= 2)
#pragma unroll
    for (int group = 0; group < half; ++group)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[group].at[e] += x[group + half].at[e];
  return x[0];
}

// Merge the results of the warps that divide the keys among themselves, and store the sums in rows 0 <= i < num_rows of
// to_stats and to_o. The bits do not depend on the number of rows of a tile. Called by all threads.
template <class Stage>
CUFLASH_DEVICE void merge_warps(RowStats& stats, Output& o, int num_rows, float softmax_scale_log2,
                                tile::Float2* to_stats, float* to_o) {
  float* const o_room = merge_room() + kStatsFloats;
  ptx::cp_async_wait<0>();
  __syncthreads();  // all warps have read queries, keys and values
  bring_to_one_maximum(stats, o, reinterpret_cast<tile::Float2*>(merge_room()), softmax_scale_log2);
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row < num_rows && key_group() == 0 && o.first_column() == 0) to_stats[row] = {{stats.max[i], stats.sum[i]}};
  }
  if constexpr (!kMergesRows) add_pairs(o, o_room);
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row >= num_rows) continue;
    if (kMergesRows) Stage::store_row(o_room + (key_group() * 16 + row) * kRowFloats, o, i);
    else if (key_group() == 0) Stage::store_row(to_o + row * kValueDim, o, i);
  }
  if constexpr (!kMergesRows) return;
  __syncthreads();  // all warps have stored their rows
  constexpr int kVectors = kValueDim / 4;
#pragma unroll 1
  for (int at = threadIdx.x; at < num_rows * kVectors; at += kThreads)
    reinterpret_cast<Vector*>(to_o)[at] = sum_of_pairs(o_room + at / kVectors * kRowFloats + at % kVectors * 4);
}

// Count a part as written. Return whether it is the last one to arrive; if so, its block sees what all others wrote.
// Called by all threads.
CUFLASH_DEVICE bool arrives_last(int* arrivals, int num_parts) {
  int& is_last = *reinterpret_cast<int*>(merge_room());
  __syncthreads();  // the part is written, and all threads have read the merge buffer
  if (num_parts == 1) return true;
  if (threadIdx.x == 0) is_last = ptx::fetch_add_acq_rel(arrivals, 1) == num_parts - 1;
  __syncthreads();
  return is_last;
}

// Merge the parts of a sequence's rows. Called by all threads of the block whose part arrives last.
CUFLASH_DEVICE void merge_parts(const Decode& params, const attention::BatchHead& heads, const Summands& parts,
                                int num_parts, float softmax_scale_log2, attention::SinkArgument<Config> sink) {
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < parts.rows; row += kNumWarps) {
    RowSum of_row;
    of_row.add(parts, row, num_parts, softmax_scale_log2);
    of_row.write(params, heads, row, softmax_scale_log2, sink);
  }
}

}  // namespace cuflash::sm80
