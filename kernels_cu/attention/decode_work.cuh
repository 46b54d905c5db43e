#pragma once
#include <attention/block_iterator.cuh>
#include <attention/decode_params.cuh>

// The work of a decode kernel's blocks: the keys of a sequence, divided into parts that depend on that sequence's
// length.
namespace cuflash::attention {

// A sequence of the cache. Its last positions are its new rows, which have the queries.
struct Sequence {
  int length, count, first_key;  // number of positions and of new rows; the first key that a new row attends
  bool is_valid;  // whether length and count are within their ranges
};

// Return a sequence. Calls meanwhile() while its length and count are loaded.
template <class Meanwhile>
CUFLASH_DEVICE Sequence sequence(const Decode& params, int number, const Meanwhile& meanwhile) {
  const CachePages& cache = params.cache;
  const int length = cache.lengths[number];
  const int count = cache.counts == nullptr ? params.num_queries : cache.counts[number];
  meanwhile();
  const int clamped = min(max(length, 0), cache.capacity);
  const int clamped_count = min(max(count, 0), params.num_queries);
  const int first_key = params.left >= clamped ? 0 : max(0, clamped - clamped_count - params.left);
  return {clamped, clamped_count, first_key, length == clamped && count == clamped_count};
}

// Return the keys that a row of a tile of packed queries attends.
CUFLASH_DEVICE RowMask packed_row_mask(const Decode& params, const Sequence& of, int row) {
  const int number = row % params.num_queries, position = of.length - of.count + number;
  const bool is_there = row < params.group_size * params.num_queries && number < of.count && position >= 0;
  if (!is_there) return {0, 0, nullptr, 0};
  return {max(0, position - min(params.left, position)), min(of.length - position, params.right + 1) + position,
          nullptr, 0};
}

// Return the keys lo <= j < hi that every new row sees. The interval is empty if some row sees no key.
CUFLASH_DEVICE Interval seen_by_all(const Decode& params, const Sequence& of) {
  if (of.count < params.num_queries || of.count > of.length) return {0, 0};
  const int first = of.length - of.count;
  return {max(0, of.length - 1 - params.left), min(of.count - 1, params.right) + first + 1};
}

// The queries of a tile, if they are new rows of a sequence, for the body of a decode kernel.
struct NewTokens {
  const Decode& params;
  const Sequence& of;

  CUFLASH_DEVICE RowMask row_mask(int row) const { return packed_row_mask(params, of, row); }
  CUFLASH_DEVICE Interval seen_by_all() const { return attention::seen_by_all(params, of); }
  CUFLASH_DEVICE int position(int number) const { return max(0, of.length - of.count + number); }
};

// The queries of a tile, if they are those of all heads that share a key/value head, for the body of a decode kernel.
struct PackedQueries {
  const Params& params;
  const BatchHead& heads;
  VisitRange keys;

  CUFLASH_DEVICE RowMask row_mask(int row) const {
    const int num_queries = params.shape.seqlen_q;
    if (row >= params.shape.group_size * num_queries) return {0, 0, nullptr, 0};
    const Interval own = interval(params, heads, row % num_queries);
    return {own.lo, own.hi, nullptr, 0};
  }
  CUFLASH_DEVICE Interval seen_by_all() const { return {keys.full_start, keys.full_stop}; }
  CUFLASH_DEVICE int position(int number) const { return number; }
};

// The keys start <= j < stop that a thread block processes.
struct Part {
  int number, num_parts;  // number of this part, and number of parts of the sequence
  int start, stop;
};

// Return a part of a sequence's keys. The parts depend only on the number of keys: each has at least Width keys, and
// there are at most max_parts of them. In kernels with parts at fixed positions, parts start at multiples of kPartKeys.
template <int Width>
CUFLASH_DEVICE Part part_of(const Decode& params, const Sequence& of, int number) {
  if constexpr (Config::kPartKeys > 0) {
    constexpr int kKeys = Config::kPartKeys > 0 ? Config::kPartKeys : 1;
    static_assert(kKeys % Width == 0 || Config::kPartKeys == 0, "a step lies within one part");
    const int first_part = of.first_key / kKeys, start = (first_part + number) * kKeys;
    const int num_parts = max(1, (of.length + kKeys - 1) / kKeys - first_part);
    return {number, num_parts, max(start, of.first_key / Width * Width), min(of.length, start + kKeys)};
  }
  const int base = of.first_key / Width * Width, num_steps = (of.length - base + Width - 1) / Width;
  const int steps = max(1, divmod(num_steps + params.max_parts - 1, params.max_parts).quotient);
  const int num_parts = max(1, divmod(num_steps + steps - 1, steps).quotient);
  const int start = base + number * steps * Width;
  return {number, num_parts, start, min(of.length, start + steps * Width)};
}

}  // namespace cuflash::attention
