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
CUFLASH_DEVICE Element& o_at(const Decode& params, const attention::BatchHead& heads, int row, int column) {
  const int head = heads.head + row / params.num_queries;
  return attention::matrix<Element>(params.o, heads, head, 0, 0).at(row % params.num_queries, column);
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
#pragma unroll
    for (int j = 0; j < Output::kColumns; ++j) {
      const int column = Stage::column(o, j);
      if (column < params.cache.value_dim) tile::to_element(o.at(i, j), o_at(params, heads, row, column));
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

// Merge all parts of a sequence in order; their rows follow each other from `first_row` on. A thread loads its first
// parts before it computes their weights. Called by all threads.
CUFLASH_DEVICE void merge_parts(const Decode& params, const attention::BatchHead& heads, int64_t first_row,
                                int num_parts, float softmax_scale_log2, attention::SinkArgument<Config> sink) {
  using Vector = tile::Vector<float>;
  // Kernels with more warps have fewer registers per thread.
  constexpr int kVectors = kValueDim / 4, kAhead = kNumWarps > 4 ? 8 : 16;
  const int own = threadIdx.x;
  const int num_rows = params.group_size * params.num_queries, num_vectors = num_rows * kVectors;
  float* const weights = merge_room();  // maxima at first, weights later
  float* const sums = weights + kMostParts * kBlockQ;
  float* const factors = sums + kMostParts * kBlockQ;
  const auto* const stats = reinterpret_cast<const tile::Float2*>(params.stats_parts) + first_row;
  const auto* const parts = reinterpret_cast<const Vector*>(params.o_parts) + first_row * kVectors;
  Vector ahead[kAhead];
#pragma unroll
  for (int part = 0; part < kAhead; ++part)
    if (part < num_parts && own < num_vectors) ahead[part] = parts[part * num_vectors + own];
  __syncthreads();  // all threads have read the merge buffer
  for (int at = own; at < num_parts * num_rows; at += kThreads) {
    const tile::Float2 of = stats[at];
    weights[at] = of.at[0];
    sums[at] = of.at[1];
  }
  __syncthreads();  // maxima and sums are stored
  for (int row = own; row < num_rows; row += kThreads) {
    float highest = ptx::negative_infinity<float>(), sum = 0;
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) highest = fmaxf(highest, weights[part * num_rows + row]);
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
      const float weight = RowStats::weight(weights[part * num_rows + row], highest, softmax_scale_log2);
      weights[part * num_rows + row] = weight;
      sum += sums[part * num_rows + row] * weight;
    }
    factors[row] = finish_row(params, heads, row, highest, sum, softmax_scale_log2, sink, true);
  }
  __syncthreads();  // weights are stored
  for (int at = own; at < num_vectors; at += kThreads) {
    const int row = at / kVectors, column = at % kVectors * 4;
    Vector o{};
    const auto add = [&](int part, const Vector& x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o.at[e] += weights[part * num_rows + row] * x.at[e];
    };
    int part = 0;
    if (at == own) {
#pragma unroll
      for (; part < kAhead; ++part)
        if (part < num_parts) add(part, ahead[part]);
    }
#pragma unroll 8
    for (; part < num_parts; ++part) add(part, parts[part * num_vectors + at]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < params.cache.value_dim)
        tile::to_element(o.at[e] * factors[row], o_at(params, heads, row, column + e));
  }
}

}  // namespace cuflash::sm80
