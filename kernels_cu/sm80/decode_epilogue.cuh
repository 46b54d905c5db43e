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
  tile::Float2* stats;
  float* o;
  int rows, row_floats;  // rows of a summand, and floats from a row of o to the next
};

// The sum of a row's summands: the row's maximum and sum, and a thread's part of o, which is four of each 128 columns.
struct RowSum {
  static constexpr int kVectors = (kValueDim + 127) / 128;

  float max = ptx::negative_infinity<float>(), sum = 0;
  Vector o[kVectors]{};

  static CUFLASH_DEVICE int column(int vector) { return 128 * vector + 4 * ptx::lane(); }
  // Add summands of a row in order, Width at a time; each thread computes the weight of one of them. Called by whole
  // warps.
  template <int Width>
  CUFLASH_DEVICE void add(const Summands& of, int row, int num_summands, float softmax_scale_log2) {
#pragma unroll 1  // keeps the code small
    for (int first = 0; first < num_summands; first += Width) {
      const int num = min(Width, num_summands - first), own = ptx::lane() % Width;
      tile::Float2 stats{{ptx::negative_infinity<float>(), 0}};
      if (own < num) stats = of.stats[(first + own) * of.rows + row];
      const float* from = of.o + static_cast<int64_t>(first * of.rows + row) * of.row_floats + column(0);
      Vector summands[Width][kVectors]{};  // loaded before their weights are known
#pragma unroll
      for (int i = 0; i < Width; ++i, from += of.rows * of.row_floats)
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          if (i < num && column(v) < kValueDim) summands[i][v] = *reinterpret_cast<const Vector*>(from + 128 * v);
      const float highest = fmaxf(max, tile::lane_max<Width>(stats.at[0]));
      const float weight = RowStats::weight(stats.at[0], highest, softmax_scale_log2);
      scale(RowStats::weight(max, highest, softmax_scale_log2));
      max = highest;
      sum += tile::lane_sum<Width>(stats.at[1] * weight);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float of_summand = __shfl_sync(0xffffffffu, weight, i);
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[v].at[e] += of_summand * summands[i][v].at[e];
      }
    }
  }
  // Store the row as a summand. Called by whole warps.
  CUFLASH_DEVICE void store(tile::Float2& stats, float* to) const {
    if (ptx::lane() == 0) stats = {{max, sum}};
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (column(v) < kValueDim) *reinterpret_cast<Vector*>(to + column(v)) = o[v];
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

// Merge the results of the warps that divide the keys among themselves, and store their sums as rows first_row and
// those after it of `to`. Called by all threads.
template <class Stage>
CUFLASH_DEVICE void merge_warps(RowStats& stats, Output& o, int num_rows, float softmax_scale_log2, const Summands& to,
                                int64_t first_row) {
  float* const o_room = merge_room() + kStatsFloats;
  auto* const stats_room = reinterpret_cast<tile::Float2*>(merge_room());
  const auto store = [&](int i, float sum, tile::Float2& to_stats, float* to_o) {
    Stage::store_row(to_o, o, i);
    if (o.first_column() == 0) to_stats = {{stats.max[i], sum}};
  };
  ptx::cp_async_wait<0>();
  __syncthreads();  // all warps have read queries, keys and values
  if constexpr (kMergesRows) {
#pragma unroll
    for (int i = 0; i < Output::kRows; ++i) {
      const float sum = tile::quad_sum(stats.sum[i]);
      const int row = o.row(i) + o.first_row(), at = key_group() * 16 + row;
      if (row < num_rows) store(i, sum, stats_room[at], o_room + at * kRowFloats);
    }
    __syncthreads();  // all warps have stored their rows
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < num_rows; row += kNumWarps) {
      RowSum of_row;
      of_row.add<kKeyGroups>({stats_room, o_room, 16, kRowFloats}, row, kKeyGroups, softmax_scale_log2);
      of_row.store(to.stats[first_row + row], to.o + (first_row + row) * kValueDim);
    }
  } else {
    add_warps(stats, o, stats_room, o_room, softmax_scale_log2);
    if (key_group() != 0) return;
#pragma unroll
    for (int i = 0; i < Output::kRows; ++i) {
      const int64_t row = first_row + o.first_row() + o.row(i);
      if (row - first_row < num_rows) store(i, stats.sum[i], to.stats[row], to.o + row * kValueDim);
    }
  }
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
    of_row.add<kPartsAtOnce>(parts, row, num_parts, softmax_scale_log2);
    of_row.write(params, heads, row, softmax_scale_log2, sink);
  }
}

}  // namespace cuflash::sm80
