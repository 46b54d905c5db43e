// Merges the partial results of thread blocks that shared the keys of a tile (split-KV). Finished parts are rescaled as
// in FlashAttention-2 (arXiv 2307.08691, section 3.1): lse = log sum_p exp(lse_p), o = sum_p exp(lse_p - lse) o_p. A
// thread block merges one query, and groups of its threads divide the parts among themselves. The order of the sums
// does not depend on the order in which the parts were written.
#include <attention/sink.cuh>
#include <attention/softmax_simt.cuh>
#include <attention/tile_scheduler.cuh>
#include <ptx/shared.cuh>
#include <sm80/parts.cuh>

namespace cuflash::sm80 {

using Element = Config::Element;
constexpr int kValueDim = Config::kValueDim;
using tile::Vector;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kColumnLanes = kValueDim > 192 ? 16 : 8, kGroups = kThreads / kColumnLanes;
// kWidth: number of columns that a group loads at once
constexpr int kVector = Vector<float>::kLength, kWidth = kColumnLanes * kVector;
constexpr int kVectors = kValueDim / kWidth;  // number of vectors per thread
static_assert(kValueDim % kWidth == 0, "a group's threads share the columns evenly");

// Return exp(lse - max_lse), the weight of a part; the exponent is not positive.
CUFLASH_DEVICE float weight(float lse, float max_lse) {
  return ptx::exp2_accurate((lse - max_lse) * static_cast<float>(attention::kLog2E));
}
constexpr int kSharedBytes = kGroups * kValueDim * static_cast<int>(sizeof(float));

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::sm80::kThreads)
sm80_combine(const __grid_constant__ cuflash::attention::Params params,
             const __grid_constant__ cuflash::sm80::Parts parts CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, 1);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const int query = work.first, seqlen_q = shape.seqlen_q;
  const int num_rows = shape.num_splits * seqlen_q;  // the rows of each part follow those of the previous part
  const auto lse_parts = matrix<float>(parts.lse_parts, batch_head, batch_head.head, num_rows, 1);
  const auto o_parts = matrix<float>(parts.o_parts, batch_head, batch_head.head, num_rows, kValueDim);

  float max_lse = ptx::negative_infinity<float>(), total = 0;
  const int first = threadIdx.x % 32 * seqlen_q + query;
  for (int row = first; row < num_rows; row += 32 * seqlen_q) max_lse = fmaxf(max_lse, lse_parts.at(row, 0));
#pragma unroll
  for (int lane_offset = 1; lane_offset < 32; lane_offset *= 2) max_lse =
      fmaxf(max_lse, __shfl_xor_sync(0xffffffffu, max_lse, lane_offset));
  const float logit = sink_logit<float>(sink, batch_head, batch_head.head);
  if (Config::kHasSink) max_lse = fmaxf(max_lse, logit);  // the sink counts as one more part, with o = 0
  if (max_lse == ptx::negative_infinity<float>()) max_lse = 0;  // avoids -inf - (-inf), which is NaN
  for (int row = first; row < num_rows; row += 32 * seqlen_q) total += weight(lse_parts.at(row, 0), max_lse);
#pragma unroll
  for (int lane_offset = 1; lane_offset < 32; lane_offset *= 2) total += __shfl_xor_sync(0xffffffffu, total,
                                                                                         lane_offset);
  if (Config::kHasSink) total += weight(logit, max_lse);

  Vector<float> o[kVectors] = {};
  const int first_column = threadIdx.x % kColumnLanes * kVector;
#pragma unroll 4
  for (int row = threadIdx.x / kColumnLanes * seqlen_q + query; row < num_rows; row += kGroups * seqlen_q) {
    const float lse = lse_parts.at(row, 0), factor = weight(lse, max_lse);
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      const auto x = reinterpret_cast<const Vector<float>&>(o_parts.at(row, first_column + c * kWidth));
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        // the part wrote o only if it saw a key
        if (lse != ptx::negative_infinity<float>()) o[c].at[e] += factor * x.at[e];
    }
  }
  float* const sums = ptx::dynamic_shared<float>() + threadIdx.x / kColumnLanes * kValueDim + first_column;
#pragma unroll
  for (int c = 0; c < kVectors; ++c) reinterpret_cast<Vector<float>&>(sums[c * kWidth]) = o[c];
  __syncthreads();  // all groups have stored their sums
  const bool is_empty = total == 0;
  const auto to = matrix<Element>(params.o, batch_head, batch_head.head, seqlen_q, shape.value_dim);
  for (int column = threadIdx.x; column < shape.value_dim; column += kThreads) {
    float sum = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) sum += ptx::dynamic_shared<float>()[group * kValueDim + column];
    tile::to_element(is_empty ? 0 : sum / total, to.at(query, column));
  }
  if (threadIdx.x == 0)
    matrix<float>(params.lse, batch_head, batch_head.head, seqlen_q, 1).at(query, 0) =
        is_empty ? ptx::negative_infinity<float>() : max_lse + ptx::log_accurate(total);
}
