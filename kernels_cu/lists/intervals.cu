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

// Return the first row of a tile that ends with its sequence, as cuflash/blocks/sequence_tiles.py numbers them. Rows
// before the first sequence, and behind the last one, count as one each.
CUFLASH_DEVICE int tile_start(const Offsets& offsets, int num_offsets, int length, int height, int number) {
  const auto bound = [&](int sequence) {
    return static_cast<int>(sequence == 0 ? 0 : sequence > num_offsets ? length
                                                                       : clipped(offsets.at(sequence - 1), 0, length));
  };
  const auto first_number = [&](int sequence) { return bound(sequence) / height + sequence; };
  int sequence = 0;
  for (int end = num_offsets + 1; sequence + 1 < end;) {
    const int middle = (sequence + end) / 2;
    if (first_number(middle) <= number) sequence = middle;
    else end = middle;
  }
  const int64_t start = bound(sequence) + int64_t{height} * (number - first_number(sequence));
  return static_cast<int>(clipped(start, 0, bound(sequence + 1)));
}

CUFLASH_DEVICE int start_of_q_tile(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  return tile_start(matrix.q, params.num_offsets, params.seqlen_q, params.tile_q, number);
}
CUFLASH_DEVICE int start_of_kv_tile(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  return tile_start(matrix.kv, params.num_offsets, params.seqlen_kv, params.tile_kv, number);
}
CUFLASH_DEVICE int tile_length(const Matrix& matrix, int number) {
  const int first = start_of_kv_tile(matrix, number), end = start_of_kv_tile(matrix, number + 1);
  return blocks_of(matrix.rows_by<false>(end - 1) - matrix.rows_by<true>(first), matrix.params.tile_q);
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps, cuflash::config::kMinBlocks)
lists_intervals(const __grid_constant__ cuflash::lists::IntervalParams params) {
  using namespace cuflash::lists;
  const int thread = blockIdx.x * kThreads + threadIdx.x;
  const int num_blocks = params.row_order == nullptr ? 0 : params.num_q_blocks + params.num_kv_blocks;
  const int num_starts = params.q_blocks == nullptr ? 0 : params.num_q_tiles + params.num_kv_tiles + 2;
  const int of_matrix = num_blocks + num_starts + params.seqlen_q;  // queries last, since they take least
  const int number = thread / of_matrix, at = thread % of_matrix;
  if (number >= params.num_matrices) return;
  const Matrix matrix(params, number);
  if (at >= num_blocks + num_starts) {
    const int query = at - num_blocks - num_starts;
    const Interval keys = matrix.keys_of(query);
    const int64_t row = static_cast<int64_t>(number) * params.seqlen_q + query;
    params.lo[row] = static_cast<int32_t>(keys.lo);
    params.hi[row] = static_cast<int32_t>(keys.hi);
  } else if (at >= num_blocks) {
    const int tile = at - num_blocks, kv_tile = tile - params.num_q_tiles - 1;
    if (kv_tile < 0) {
      params.q_blocks[number * (params.num_q_tiles + 1) + tile] = start_of_q_tile(matrix, tile);
    } else {
      params.kv_blocks[number * (params.num_kv_tiles + 1) + kv_tile] = start_of_kv_tile(matrix, kv_tile);
      if (kv_tile < params.num_kv_tiles)
        params.tile_lengths[number * params.num_kv_tiles + kv_tile] = tile_length(matrix, kv_tile);
    }
  } else if (at < params.num_q_blocks) {
    params.row_lengths[number * params.num_q_blocks + at] = row_length(matrix, at);
  } else {
    const int column = at - params.num_q_blocks;
    params.column_lengths[number * params.num_kv_blocks + column] = column_length(matrix, column);
  }
}
