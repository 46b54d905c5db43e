// Computes the keys that each query sees, with one thread per query, from integers on the device: offsets of packed
// sequences, lengths, or document ids. If blocks are ordered, it also counts the key blocks that each query block sees,
// and the query blocks that see each key block.
#include <lists/interval_params.cuh>
#include <ptx/thread.cuh>

namespace cuflash::lists {

using attention::Integer;
using attention::Integers;
using attention::integers_of;
using attention::kFar;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kMaxLength = 255;  // in blocks; orders treat longer ranges as this long

CUFLASH_DEVICE int64_t clipped(int64_t x, int64_t lowest, int64_t highest) {
  return x < lowest ? lowest : x > highest ? highest : x;
}

struct Interval {
  int64_t lo, hi;
};

// Return the keys of a query, as masks.Sequences defines them. The interval of a query after all sequences starts past
// all keys.
CUFLASH_DEVICE Interval keys_of_sequence(const IntervalParams& params, const Integers& q, const Integers& kv,
                                         int query) {
  int after = 0;  // number of offsets that are at most the query's index
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

// Return the keys of a query, as masks.Lengths defines them. The interval of a query past its length starts past all
// keys.
CUFLASH_DEVICE Interval keys_of_lengths(const IntervalParams& params, const Integers& q, const Integers& kv,
                                        int query) {
  const int64_t q_length = q.data == nullptr ? params.q_length : q.at(0);
  return {query < q_length ? 0 : kFar, kv.data == nullptr ? params.kv_length : kv.at(0)};
}

// Return the first number of a range for which a condition holds, or the end of the range. If the condition holds for a
// number, it must hold for all later numbers.
template <class Condition>
CUFLASH_DEVICE int first_for_which(Condition holds, int first, int end) {
  while (first < end) {
    const int middle = first + (end - first) / 2;
    if (holds(middle)) end = middle;
    else first = middle + 1;
  }
  return first;
}

// Return the keys of a query, as masks.Documents defines them. If queries and keys share their ids, the result is the
// run of equal ids around the query. Otherwise the ids of the queries and those of the keys must each never decrease.
CUFLASH_DEVICE Interval keys_of_document(const IntervalParams& params, const Integers& q, const Integers& kv,
                                         int query) {
  const Integer id = q.exact(query);
  if (params.kv_integers == nullptr)
    return {first_for_which([&](int i) { return q.exact(i) == id; }, 0, query),
            first_for_which([&](int i) { return !(q.exact(i) == id); }, query + 1, params.seqlen_q)};
  const int lo = first_for_which([&](int j) { return !(kv.exact(j) < id); }, 0, params.seqlen_kv);
  return {lo, first_for_which([&](int j) { return id < kv.exact(j); }, lo, params.seqlen_kv)};
}

// The matrix of a batch entry and head.
struct Matrix {
  const IntervalParams& params;
  Integers q, kv;
  int64_t first_of_rows;

  CUFLASH_DEVICE Matrix(const IntervalParams& params, int number) : params(params) {
    const int batch_entry = number / params.num_heads, head = number % params.num_heads;
    first_of_rows = batch_entry * params.rows_batch_stride + head * params.rows_head_stride;
    q = {nullptr, params.q_stride, params.q_itemsize, params.is_q_signed != 0};
    kv = {nullptr, params.kv_stride, params.kv_itemsize, params.is_kv_signed != 0};
    if (params.q_integers != nullptr)
      q.data = integers_of(params.batch, params.q_integers, params.q_batch_strides, batch_entry);
    if (params.kv_integers != nullptr)
      kv.data = integers_of(params.batch, params.kv_integers, params.kv_batch_strides, batch_entry);
    else if (params.kind == kSequences)
      kv = q;
  }

  CUFLASH_DEVICE Interval keys_of(int query) const {
    const Interval keys = params.kind == kSequences ? keys_of_sequence(params, q, kv, query)
                          : params.kind == kLengths ? keys_of_lengths(params, q, kv, query)
                                                    : keys_of_document(params, q, kv, query);
    const int64_t lo = clipped(keys.lo, 0, params.seqlen_kv), hi = clipped(keys.hi, 0, params.seqlen_kv);
    if (params.rows_lo == nullptr) return {lo, hi};
    const int64_t rows_lo = params.rows_lo[first_of_rows + query], rows_hi = params.rows_hi[first_of_rows + query];
    return {lo > rows_lo ? lo : rows_lo, hi < rows_hi ? hi : rows_hi};
  }

  // Return the number of queries that see some key of a range: the queries whose intervals start at or before its last
  // key, minus those whose intervals end at or before its first key. Called by whole warps: one half counts starts and
  // the other counts ends. Each lane tests a different query, since each test is a search in the offsets.
  CUFLASH_DEVICE int num_queries_of(int first_key, int last_key) const {
    constexpr int kLanes = 16;
    const bool counts_ends = ptx::lane() >= kLanes;
    const int key = counts_ends ? first_key : last_key;
    int counted = 0, end = params.seqlen_q;  // queries before `counted` count, and queries from `end` on do not
    while (__any_sync(0xffffffffu, counted < end)) {
      const int step = (end - counted + kLanes - 1) / kLanes, query = counted + (ptx::lane() % kLanes + 1) * step - 1;
      bool counts = false;
      if (counted < end && query < end) {
        const Interval keys = keys_of(query);
        counts = (counts_ends ? keys.hi : keys.lo) <= key;
      }
      const unsigned votes = __ballot_sync(0xffffffffu, counts);
      counted += __popc(counts_ends ? votes >> kLanes : votes & 0xffff) * step;
      if (step > 0 && counted + step - 1 < end) end = counted + step - 1;
    }
    return __shfl_sync(0xffffffffu, counted, 0) - __shfl_sync(0xffffffffu, counted, kLanes);
  }
};

// Return the minimum number of blocks that contain `length` positions, clamped to kMaxLength.
CUFLASH_DEVICE int num_blocks_of(int length, int block) {
  return static_cast<int>(clipped(length > 0 ? (length - 1) / block + 1 : 0, 0, kMaxLength));
}

// Return the length by which a query block is ordered: the number of key blocks that the intervals of its queries
// cover.
CUFLASH_DEVICE int row_length(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  const int first = number * params.block_q, end = first + params.block_q;
  const int last = (end < params.seqlen_q ? end : params.seqlen_q) - 1;
  return num_blocks_of(static_cast<int>(matrix.keys_of(last).hi - matrix.keys_of(first).lo), params.block_kv);
}

// Return the length by which a key block is ordered: the number of query blocks that the queries that see its keys
// cover. Called by whole warps.
CUFLASH_DEVICE int column_length(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  const int first = number * params.block_kv, end = first + params.block_kv;
  const int last = (end < params.seqlen_kv ? end : params.seqlen_kv) - 1;
  return num_blocks_of(matrix.num_queries_of(first, last), params.block_q);
}

// Return the first row of a tile that ends with its sequence; cuflash/blocks/sequence_tiles.py numbers the tiles in the
// same way. The rows before the first sequence count as a sequence, and so do those after the last one.
CUFLASH_DEVICE int tile_start(const Integers& offsets, int num_offsets, int length, int height, int number) {
  const auto bound = [&](int sequence) {
    return static_cast<int>(sequence == 0            ? 0
                            : sequence > num_offsets ? length
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

// Return the first row of a tile that ends with its sequence: of a query tile or, in the second function, of a key
// tile.
CUFLASH_DEVICE int start_of_q_tile(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  return tile_start(matrix.q, params.num_offsets, params.seqlen_q, params.tile_q, number);
}
CUFLASH_DEVICE int start_of_kv_tile(const Matrix& matrix, int number) {
  const IntervalParams& params = matrix.params;
  return tile_start(matrix.kv, params.num_offsets, params.seqlen_kv, params.tile_kv, number);
}
// Return the length by which such a key tile is ordered: the number of query tiles that see it. Called by whole warps.
CUFLASH_DEVICE int tile_length(const Matrix& matrix, int number) {
  const int first = start_of_kv_tile(matrix, number), end = start_of_kv_tile(matrix, number + 1);
  return num_blocks_of(matrix.num_queries_of(first, end - 1), matrix.params.tile_q);
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps, cuflash::Config::kMinBlocks)
lists_intervals(const __grid_constant__ cuflash::lists::IntervalParams params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  // One warp computes each key block and each key tile; then one thread computes each query block, each start of a
  // tile, and each query.
  const int num_columns = params.row_order == nullptr ? 0 : params.num_kv_blocks;
  const int num_rows = params.row_order == nullptr ? 0 : params.num_q_blocks;
  const int num_tiles = params.q_blocks == nullptr ? 0 : params.num_kv_tiles;
  const int num_starts = params.q_blocks == nullptr ? 0 : params.num_q_tiles + params.num_kv_tiles + 2;
  const int warps_per_matrix = num_columns + num_tiles, num_warps = params.num_matrices * warps_per_matrix;
  const int thread = blockIdx.x * kThreads + threadIdx.x, warp = thread / 32;
  if (warp < num_warps) {
    const int number = warp / warps_per_matrix, at = warp % warps_per_matrix, tile = at - num_columns;
    const Matrix matrix(params, number);
    const int length = tile < 0 ? column_length(matrix, at) : tile_length(matrix, tile);
    if (ptx::lane() > 0) return;
    if (tile < 0) params.column_lengths[number * num_columns + at] = length;
    else params.tile_lengths[number * num_tiles + tile] = length;
    return;
  }
  const int threads_per_matrix = num_rows + num_starts + params.seqlen_q;
  const int number = (thread - 32 * num_warps) / threads_per_matrix;
  const int at = (thread - 32 * num_warps) % threads_per_matrix;
  if (number >= params.num_matrices) return;
  const Matrix matrix(params, number);
  const int start = at - num_rows, query = start - num_starts, kv_start = start - params.num_q_tiles - 1;
  if (start < 0) {
    params.row_lengths[number * num_rows + at] = row_length(matrix, at);
  } else if (query >= 0) {
    const Interval keys = matrix.keys_of(query);
    const int64_t row = static_cast<int64_t>(number) * params.seqlen_q + query;
    params.lo[row] = static_cast<int32_t>(keys.lo);
    params.hi[row] = static_cast<int32_t>(keys.hi);
  } else if (kv_start < 0) {
    params.q_blocks[number * (params.num_q_tiles + 1) + start] = start_of_q_tile(matrix, start);
  } else {
    params.kv_blocks[number * (params.num_kv_tiles + 1) + kv_start] = start_of_kv_tile(matrix, kv_start);
  }
}
