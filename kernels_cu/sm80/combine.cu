// Merges what the blocks that shared a tile's keys left, by the rescaling of FlashAttention-2 (arXiv 2307.08691,
// section 3.1) applied to finished parts: lse = log sum_p exp(lse_p), o = sum_p exp(lse_p - lse) o_p. A block works on
// one query; groups of its threads share the parts. Whichever of them is first, sums are in the same order.
#include <attention/online_softmax.cuh>
#include <attention/sink.cuh>
#include <attention/work_tile.cuh>
#include <ptx/shared.cuh>

namespace cuflash {

using config::Element;
using config::kValueDim;
using tile::Vector;

constexpr int kThreads = 32 * config::kNumWarps;
constexpr int kColumnLanes = kValueDim > 192 ? 16 : 8, kGroups = kThreads / kColumnLanes;
constexpr int kVector = Vector<float>::kLength, kWidth = kColumnLanes * kVector;  // of what a group moves at once
constexpr int kVectors = kValueDim / kWidth;                                      // of a thread
static_assert(kValueDim % kWidth == 0, "a group's threads share the columns evenly");

// exp of a number that is not positive.
CUFLASH_DEVICE float weight(float lse, float most) {
  return ptx::exp2_accurate((lse - most) * static_cast<float>(attention::kLog2E));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
sm80_combine(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, 1);
  if (work.is_empty()) return;
  const Place& place = work.place;
  const int query = work.first, seqlen_q = shape.seqlen_q;
  const int num_rows = shape.num_splits * seqlen_q;  // those of a part follow the last part's
  const auto lse_parts = matrix<float>(params.parts.lse_parts, place, place.head, num_rows, 1);
  const auto o_parts = matrix<float>(params.parts.o_parts, place, place.head, num_rows, kValueDim);

  float most = ptx::negative_infinity<float>(), total = 0;
  const int first = threadIdx.x % 32 * seqlen_q + query;
  for (int row = first; row < num_rows; row += 32 * seqlen_q) most = fmaxf(most, lse_parts.at(row, 0));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  const float logit = sink_logit<float>(sink, place, place.head);
  if (config::kHasSink) most = fmaxf(most, logit);  // the sink is one more part, with o = 0
  if (most == ptx::negative_infinity<float>()) most = 0;  // -inf - (-inf) must not arise
  for (int row = first; row < num_rows; row += 32 * seqlen_q) total += weight(lse_parts.at(row, 0), most);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  if (config::kHasSink) total += weight(logit, most);

  Vector<float> o[kVectors] = {};
  const int first_column = threadIdx.x % kColumnLanes * kVector;
#pragma unroll 4
  for (int row = threadIdx.x / kColumnLanes * seqlen_q + query; row < num_rows; row += kGroups * seqlen_q) {
    const float lse = lse_parts.at(row, 0), by = weight(lse, most);
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      const auto x = reinterpret_cast<const Vector<float>&>(o_parts.at(row, first_column + c * kWidth));
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (lse != ptx::negative_infinity<float>()) o[c].at[e] += by * x.at[e];  // else o of the part was not written
    }
  }
  float* const sums = ptx::dynamic_shared<float>() + threadIdx.x / kColumnLanes * kValueDim + first_column;
#pragma unroll
  for (int c = 0; c < kVectors; ++c) reinterpret_cast<Vector<float>&>(sums[c * kWidth]) = o[c];
  __syncthreads();  // every group's sums are there
  const bool is_empty = total == 0;
  const auto to = matrix<Element>(params.o, place, place.head, seqlen_q, shape.value_dim);
  for (int column = threadIdx.x; column < shape.value_dim; column += kThreads) {
    float sum = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) sum += ptx::dynamic_shared<float>()[group * kValueDim + column];
    tile::narrow(is_empty ? 0 : sum / total, to.at(query, column));
  }
  if (threadIdx.x == 0)
    matrix<float>(params.lse, place, place.head, seqlen_q, 1).at(query, 0) =
        is_empty ? ptx::negative_infinity<float>() : most + ptx::log_accurate(total);
}
