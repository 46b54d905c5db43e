// Finds the keys that each query of packed sequences sees, a thread a query, from the offsets on the device.
#include <lists/interval_params.cuh>

namespace cuflash::lists {

constexpr int kThreads = 32 * config::kNumWarps;
constexpr int64_t kFar = 1LL << 62;  // beyond any key

// The offsets of a batch entry.
struct Offsets {
  const unsigned char* data;
  int64_t stride;
  int itemsize;
  bool is_signed;

  CUFLASH_DEVICE int64_t at(int number) const {
    const void* const from = data + number * stride;
    if (itemsize == 8) {
      const int64_t value = *static_cast<const int64_t*>(from);
      return is_signed || (value >= 0 && value < kFar) ? value : kFar;
    }
    if (itemsize == 4) return is_signed ? *static_cast<const int32_t*>(from) : *static_cast<const uint32_t*>(from);
    if (itemsize == 2) return is_signed ? *static_cast<const int16_t*>(from) : *static_cast<const uint16_t*>(from);
    return is_signed ? *static_cast<const int8_t*>(from) : *static_cast<const uint8_t*>(from);
  }
};

CUFLASH_DEVICE const unsigned char* offsets_of(const IntervalParams& params, const void* offsets, const int64_t* strides,
                                               int batch_entry) {
  const unsigned char* data = static_cast<const unsigned char*>(offsets);
  for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
    data += batch_entry % params.batch[axis] * strides[axis];
    batch_entry /= params.batch[axis];
  }
  return data;
}

CUFLASH_DEVICE int64_t clipped(int64_t x, int64_t lowest, int64_t highest) {
  return x < lowest ? lowest : x > highest ? highest : x;
}

struct Interval {
  int64_t lo, hi;
};

// The keys of a query, as masks.Sequences has them. Queries after all sequences start beyond all keys.
CUFLASH_DEVICE Interval keys_of(const IntervalParams& params, const Offsets& q, const Offsets& kv, int query) {
  int after = 0;  // offsets that are not beyond the query
  for (int end = params.num_offsets; after < end;) {
    const int middle = (after + end) / 2;
    if (q.at(middle) <= query) after = middle + 1;
    else end = middle;
  }
  const int last = params.num_offsets - 1, first = after > 0 ? after - 1 : 0, end = after < last ? after : last;
  const int64_t start = kv.at(first), stop = kv.at(end);
  const int64_t diagonal = query + (params.is_bottom_right ? stop - q.at(end) : start - q.at(first));
  const int64_t hi = clipped(diagonal + params.right + 1, start, stop);
  return {after > last ? kFar : clipped(diagonal - params.left, start, stop), hi};
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps)
lists_intervals(const __grid_constant__ cuflash::lists::IntervalParams params) {
  using namespace cuflash::lists;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (number >= static_cast<int64_t>(params.num_matrices) * params.seqlen_q) return;
  const int matrix = static_cast<int>(number / params.seqlen_q), query = static_cast<int>(number % params.seqlen_q);
  const int batch_entry = matrix / params.num_heads, head = matrix % params.num_heads;
  const Offsets q{offsets_of(params, params.q_offsets, params.q_batch_strides, batch_entry), params.q_stride,
                  params.q_itemsize, params.is_q_signed != 0};
  const Offsets kv = params.kv_offsets == nullptr
      ? q : Offsets{offsets_of(params, params.kv_offsets, params.kv_batch_strides, batch_entry), params.kv_stride,
                    params.kv_itemsize, params.is_kv_signed != 0};
  const Interval keys = keys_of(params, q, kv, query);
  int64_t lo = clipped(keys.lo, 0, params.seqlen_kv), hi = clipped(keys.hi, 0, params.seqlen_kv);
  if (params.rows_lo != nullptr) {
    const int64_t at = batch_entry * params.rows_batch_stride + head * params.rows_head_stride + query;
    lo = lo > params.rows_lo[at] ? lo : params.rows_lo[at];
    hi = hi < params.rows_hi[at] ? hi : params.rows_hi[at];
  }
  params.lo[number] = static_cast<int32_t>(lo);
  params.hi[number] = static_cast<int32_t>(hi);
}
