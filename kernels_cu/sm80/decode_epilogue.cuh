#pragma once
#include <attention/sink.cuh>
#include <ptx/arrival.cuh>
#include <sm80/decode_softmax.cuh>

// Writes results of a decode kernel (sm80/decode.cuh) to global memory: those of a whole sequence, those of a part, or
// the merged results, which the block that ends last computes.
namespace cuflash::sm80 {

// Write lse of a row in one of the threads that call this, and return the factor by which its o must be multiplied.
CUFLASH_DEVICE float finish_row(const Decode& params, const attention::BatchHead& heads, int row, float max, float sum,
                                float softmax_scale_log2, attention::SinkArgument<Config> sink, bool writes_lse) {
  using namespace attention;
  const int head = heads.head + row / params.num_queries;
  const bool is_empty = max == ptx::negative_infinity<float>() && sum == 0;
  float lse = max, factor = 0;
  if (!is_empty) {
    lse = ptx::fma(max, softmax_scale_log2 * static_cast<float>(kLn2), ptx::log_accurate(sum));
    factor = 1 / sum;
  }
  if constexpr (Config::kHasSink) factor *= merge_sink(lse, sink_logit<float>(sink, heads, head));
  if (writes_lse) matrix<float>(params.lse, heads, head, params.num_queries, 1).at(row % params.num_queries, 0) = lse;
  return factor;
}
// Return the first element of the output of a row.
CUFLASH_DEVICE Element* row_of_o(const Decode& params, const attention::BatchHead& heads, int row) {
  const int head = heads.head + row / params.num_queries;
  return &attention::matrix<Element>(params.o, heads, head, 0, 0).at(row % params.num_queries, 0);
}

// Write the results of a sequence that has a single part. Called by the warps that hold the results.
template <class Stage>
CUFLASH_DEVICE void write_results(const Decode& params, const attention::BatchHead& heads, const RowStats& stats,
                                  Output& o, float softmax_scale_log2, attention::SinkArgument<Config> sink) {
  const int num_rows = params.group_size * params.num_queries;
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row >= num_rows) continue;
    const bool is_first = o.first_column() == 0;
    const float factor = finish_row(params, heads, row, stats.max[i], stats.sum[i], softmax_scale_log2, sink, is_first);
    o.scale_row(i, factor);
    Element* const to = row_of_o(params, heads, row);
#pragma unroll
    for (int j = 0; j < Output::kColumns; ++j) {
      const int column = Stage::column(o, j);
      if (column < params.cache.value_dim) tile::to_element(o.at(i, j), to[column * params.o.column_stride]);
    }
  }
}

// Write the results of one part, which are merged later. Called by the warps that hold the results.
template <class Stage>
CUFLASH_DEVICE void write_part(const Decode& params, int64_t first_row, const RowStats& stats, const Output& o) {
  const int num_rows = params.group_size * params.num_queries;
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row >= num_rows) continue;
    Stage::store_row(params.o_parts + (first_row + row) * kValueDim, o, i);
    if (o.first_column() == 0)
      reinterpret_cast<tile::Float2*>(params.stats_parts)[first_row + row] = {stats.max[i], stats.sum[i]};
  }
}

// Count a part as written. Return whether it is the last one to arrive; if so, its block sees what all others wrote.
// Called by all threads.
CUFLASH_DEVICE bool arrives_last(int* arrivals, int num_parts) {
  int& is_last = *reinterpret_cast<int*>(merge_room());
  __syncthreads();  // the part is written, and all threads have read the merge buffer
  if (threadIdx.x == 0) is_last = ptx::fetch_add_acq_rel(arrivals, 1) == num_parts - 1;
  __syncthreads();
  return is_last;
}

// Merge all parts of a sequence in order; their rows follow each other from `first_row` on. A thread loads its part of
// the first parts before it computes their weights. Called by all threads.
CUFLASH_DEVICE void merge_parts(const Decode& params, const attention::BatchHead& heads, int64_t first_row,
                                int num_parts, float softmax_scale_log2, attention::SinkArgument<Config> sink) {
  using Vector = tile::Vector<float>;
  // Kernels with more warps have fewer registers per thread.
  constexpr int kVectors = kValueDim / 4, kAhead = kNumWarps > 4 ? 8 : 16;
  const int own = threadIdx.x;
  const int num_rows = params.group_size * params.num_queries, num_vectors = num_rows * kVectors;
  const auto* const parts = reinterpret_cast<const Vector*>(params.o_parts) + first_row * kVectors;
  Vector ahead[kAhead];
#pragma unroll
  for (int part = 0; part < kAhead; ++part)
    if (part < num_parts && own < num_vectors) ahead[part] = parts[part * num_vectors + own];
  auto* const stats = reinterpret_cast<tile::Float2*>(merge_room());  // maximum and sum
  __syncthreads();  // all threads have read the merge buffer
#pragma unroll 1
  for (int at = own; at < num_parts * num_rows; at += kThreads)
    stats[at] = reinterpret_cast<const tile::Float2*>(params.stats_parts)[first_row + at];
  __syncthreads();  // maxima and sums are stored
#pragma unroll 1
  for (int at = own; at < num_vectors; at += kThreads) {
    const int row = at / kVectors, column = at % kVectors * 4;
    const tile::Float2* const of_row = stats + row;
    float highest = ptx::negative_infinity<float>(), sum = 0;
#pragma unroll 4
    for (int part = 0; part < num_parts; ++part) highest = fmaxf(highest, of_row[part * num_rows].at[0]);
    Vector o{};
    const auto add = [&](int part, const Vector& x) {
      const tile::Float2 of = of_row[part * num_rows];
      const float weight = RowStats::weight(of.at[0], highest, softmax_scale_log2);
      sum += of.at[1] * weight;
#pragma unroll
      for (int e = 0; e < 4; ++e) o.at[e] += weight * x.at[e];
    };
    int part = 0;
    if (at == own) {
#pragma unroll
      for (; part < kAhead; ++part)
        if (part < num_parts) add(part, ahead[part]);
    }
#pragma unroll 4
    for (; part < num_parts; ++part) add(part, parts[part * num_vectors + at]);
    const float factor = finish_row(params, heads, row, highest, sum, softmax_scale_log2, sink, column == 0);
    Element* const to = row_of_o(params, heads, row);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < params.cache.value_dim)
        tile::to_element(o.at[e] * factor, to[(column + e) * params.o.column_stride]);
  }
}

}  // namespace cuflash::sm80
