// Finds the keys that each query of packed sequences sees, a thread a query, from the offsets on the device.
#include <lists/interval_params.cuh>

namespace cuflash::lists {

constexpr int kThreads = 32 * config::kNumWarps;
constexpr int64_t kFar = 1LL << 62;  // beyond any key
constexpr int kMaxLength = 255;       // in blocks: longer ranges count as this long

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

// Return the keys of a query, as masks.Sequences defines them. Queries after all sequences start beyond all keys.
CUFLASH_DEVICE Interval keys_of_sequence(const IntervalParams& params, const Offsets& q, const Offsets& kv, int query) {
  int after = 0;  // number of offsets that are not beyond the query
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

// The matrix of a batch entry and head.
struct Matrix {
  const IntervalParams& params;
  Offsets q, kv;
  int64_t first_of_rows;

  CUFLASH_DEVICE Matrix(const IntervalParams& params, int number) : params(params) {
    const int batch_entry = number / params.num_heads, head = number % params.num_heads;
    first_of_rows = batch_entry * params.rows_batch_stride + head * params.rows_head_stride;
    q = {offsets_of(params, params.q_offsets, params.q_batch_strides, batch_entry), params.q_stride, params.q_itemsize,
         params.is_q_signed != 0};
    kv = q;
    if (params.kv_offsets != nullptr)
      kv = {offsets_of(params, params.kv_offsets, params.kv_batch_strides, batch_entry), params.kv_stride,
            params.kv_itemsize, params.is_kv_signed != 0};
  }

  CUFLASH_DEVICE Interval keys_of(int query) const {
    const Interval keys = keys_of_sequence(params, q, kv, query);
    const int64_t lo = clipped(keys.lo, 0, params.seqlen_kv), hi = clipped(keys.hi, 0, params.seqlen_kv);
    if (params.rows_lo == nullptr) return {lo, hi};
    const int64_t rows_lo = params.rows_lo[first_of_rows + query], rows_hi = params.rows_hi[first_of_rows + query];
    return {lo > rows_lo ? lo : rows_lo, hi < rows_hi ? hi : rows_hi};
  }

  // Return how many queries end, or start, at or before a key.
  template <bool IsEnd>
  CUFLASH_DEVICE int rows_by(int key) const {
    int first = 0;
    for (int last = params.seqlen_q; first < last;) {
      const int middle = (first + last) / 2;
      const Interval keys = keys_of(middle);
      if ((IsEnd ? keys.hi : keys.lo) <= key) first = middle + 1;
      else last = middle;
    }
    return first;
  }
};

// Return the least number of blocks of a side that a range touches, up to the largest number that orders tell apart.
CUFLASH_DEVICE int blocks_of(int length, int block) {
  return static_cast<int>(clipped(length > 0 ? (length - 1) / block + 1 : 0, 0, kMaxLength));
}

CUFLASH_DEVICE int row_length(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  const int first = number * params.block_q, end = first + params.block_q;
  const int last = (end < params.seqlen_q ? end : params.seqlen_q) - 1;
  return blocks_of(static_cast<int>(matrix.keys_of(last).hi - matrix.keys_of(first).lo), params.block_kv);
}

CUFLASH_DEVICE int column_length(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  const int first = number * params.block_kv, end = first + params.block_kv;
  const int last = (end < params.seqlen_kv ? end : params.seqlen_kv) - 1;
  return blocks_of(matrix.rows_by<false>(last) - matrix.rows_by<true>(first), params.block_q);
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps, cuflash::config::kMinBlocks)
lists_intervals(const __grid_constant__ cuflash::lists::IntervalParams params) {
  using namespace cuflash::lists;
  const int thread = blockIdx.x * kThreads + threadIdx.x;
  const int num_blocks = params.row_order == nullptr ? 0 : params.num_q_blocks + params.num_kv_blocks;
  const int of_matrix = num_blocks + params.seqlen_q;  // blocks first, since they take longer
  const int number = thread / of_matrix, at = thread % of_matrix;
  if (number >= params.num_matrices) return;
  const Matrix matrix(params, number);
  if (at >= num_blocks) {
    const int query = at - num_blocks;
    const Interval keys = matrix.keys_of(query);
    const int64_t row = static_cast<int64_t>(number) * params.seqlen_q + query;
    params.lo[row] = static_cast<int32_t>(keys.lo);
    params.hi[row] = static_cast<int32_t>(keys.hi);
  } else if (at < params.num_q_blocks) {
    params.row_lengths[number * params.num_q_blocks + at] = row_length(matrix, at);
  } else {
    const int column = at - params.num_q_blocks;
    params.column_lengths[number * params.num_kv_blocks + column] = column_length(matrix, column);
  }
}
