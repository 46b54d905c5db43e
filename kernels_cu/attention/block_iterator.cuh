#pragma once
#include <attention/tile_scheduler.cuh>

// The blocks that a tile visits, step by step, and the elements that masks allow in a step.
namespace cuflash::attention {

// The kind of a block's mask: none, an interval of keys for each query, or a bit for each query and key.
enum class BlockKind : int { kFull = 1, kInterval = 2, kBits = 3 };

// Keys lo <= j < hi.
struct Interval {
  int lo, hi;
};

CUFLASH_DEVICE int clamped(int64_t x, int length) { return x < 0 ? 0 : x > length ? length : static_cast<int>(x); }

// Convert a position along a sequence to int; positions beyond the range of int become its limits.
CUFLASH_DEVICE int clamped_to_int(int64_t x) {
  constexpr int64_t kFar = 1 << 30;
  return static_cast<int>(max(min(x, kFar), -kFar));
}

// Return the keys lo <= j < hi that query i attends, under a mask that is an interval for each query.
CUFLASH_DEVICE Interval interval(const Params& params, const BatchHead& batch_head, int i) {
  const WorkList& list = params.work;
  const int length = params.shape.seqlen_kv;
  if (list.lo == nullptr) return {clamped(i + list.lower, length), clamped(i + list.upper + 1, length)};
  const int64_t at = batch_head.batch_index * list.interval_batch_stride +
      batch_head.head * list.interval_head_stride + i;
  return {clamped(list.lo[at], length), clamped(list.hi[at], length)};
}

// The keys that a query attends in a step: lo <= j < hi and, if there are bits, only those whose bit is 1.
struct RowMask {
  int lo, hi;
  const uint8_t* bits;  // bits of the keys from first_bit_key on, or null
  int first_bit_key;

  CUFLASH_DEVICE bool allows(int j) const {
    if (j < lo || j >= hi) return false;
    if (bits == nullptr) return true;
    const unsigned key = j - first_bit_key;
    return bits[key / 8] >> key % 8 & 1;
  }
};

// The block that a step visits: the keys (in backward passes, the queries) start <= x < stop, under one kind of mask.
struct KvBlock {
  int start, stop;
  BlockKind kind;
  int entry;  // entry of the list, if the mask is bits

  // Return the mask of a query in this block. Call it once per row: if it were inlined at each use, it would make up
  // most of a kernel's code.
  CUFLASH_DEVICE RowMask row_mask(const Params& params, const BatchHead& batch_head, int i) const {
    const int length = params.shape.seqlen_kv;
    if (kind == BlockKind::kFull) return {0, length, nullptr, 0};
    if (kind == BlockKind::kBits) {
      const WorkList& list = params.work;
      const int64_t row =
          static_cast<int64_t>(list.tiles[entry]) * list.block_q + i - list.q_blocks[entry] * list.block_q;
      return {0, length, list.bits + row * ((list.block_kv + 7) / 8), list.kv_blocks[entry] * list.block_kv};
    }
    const Interval keys = interval(params, batch_head, i);
    return {keys.lo, keys.hi, nullptr, 0};
  }
  CUFLASH_DEVICE bool is_allowed(const Params& params, const BatchHead& batch_head, int i, int j) const {
    return row_mask(params, batch_head, i).allows(j);
  }
};

// The range that a tile visits: keys, for a tile of queries, or queries, for a tile of keys. The range is start <= x <
// stop, of which full_start <= x < full_stop needs no mask. With a list, it also has the list entries first_entry <= x
// < last_entry.
struct VisitRange {
  int start, stop, full_start, full_stop;
  int first_entry, last_entry;
};

// Return the keys that a tile of queries may visit.
CUFLASH_DEVICE VisitRange visit_range_of_queries(const Params& params, const WorkTile& tile) {
  const Interval first = interval(params, tile.batch_head, tile.first),
      last = interval(params, tile.batch_head, tile.last - 1);
  VisitRange visit_range{first.lo, last.hi, last.lo, first.hi};
  const WorkList& list = params.work;
  if (list.row_pointers != nullptr) {
    const int32_t* const row = list.row_pointers + list_index(list, tile.batch_head) * list.num_q_blocks +
        divmod(tile.first, list.block_q).quotient;
    visit_range.first_entry = row[0];
    visit_range.last_entry = row[1];
  }
  return visit_range;
}

// Return the number of queries whose interval ends at or before a key. The second function counts those whose interval
// starts at or before a key. Neither lo nor hi ever decreases from one query to the next.
CUFLASH_DEVICE int rows_ending_by(const Params& params, const BatchHead& batch_head, int key) {
  if (params.work.lo == nullptr) return clamped(key - params.work.upper, params.shape.seqlen_q);
  int first = 0, last = params.shape.seqlen_q;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (interval(params, batch_head, middle).hi <= key) first = middle + 1;
    else last = middle;
  }
  return first;
}
CUFLASH_DEVICE int rows_starting_by(const Params& params, const BatchHead& batch_head, int key) {
  if (params.work.lo == nullptr) return clamped(key - params.work.lower + 1, params.shape.seqlen_q);
  int first = 0, last = params.shape.seqlen_q;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (interval(params, batch_head, middle).lo <= key) first = middle + 1;
    else last = middle;
  }
  return first;
}

// Find the list entries of a tile of keys, if there is a list.
CUFLASH_DEVICE void find_list_entries(const Params& params, const WorkTile& tile, VisitRange& visit_range) {
  const WorkList& list = params.work;
  if (list.column_pointers == nullptr) return;
  const int32_t* const column = list.column_pointers + list_index(list, tile.batch_head) * list.num_kv_blocks +
      divmod(tile.first, list.block_kv).quotient;
  visit_range.first_entry = column[0];
  visit_range.last_entry = column[1];
}

// Return the queries of one head that may visit a tile of keys.
CUFLASH_DEVICE VisitRange visit_range_of_keys(const Params& params, const WorkTile& tile) {
  VisitRange visit_range{rows_ending_by(params, tile.batch_head, tile.first),
                         rows_starting_by(params, tile.batch_head, tile.last - 1),
                         rows_ending_by(params, tile.batch_head, tile.last - 1),
                         rows_starting_by(params, tile.batch_head, tile.first)};
  find_list_entries(params, tile, visit_range);
  return visit_range;
}

// Extend a visit range of queries to the start of a tile of queries, as `work_tile` cuts them, and return it.
CUFLASH_DEVICE VisitRange aligned_to_tiles(const Params& params, VisitRange visit_range, int height) {
  const int offset_in_block = params.work.row_pointers != nullptr
      ? divmod(visit_range.start, params.work.block_q).remainder : visit_range.start;
  visit_range.start -= offset_in_block % height;
  return visit_range;
}

// The two ways in which BlockIterator walks a list: along a row, over the key blocks that a tile of queries visits, or
// along a column, over the query blocks that visit a tile of keys.
struct OverKvBlocks {
  static CUFLASH_DEVICE int entry(const WorkList&, int position) { return position; }
  static CUFLASH_DEVICE BlockKind kind(const WorkList& list, int position) {
    return static_cast<BlockKind>(list.kinds[position]);
  }
  static CUFLASH_DEVICE int first(const WorkList& list, int position) {
    return list.kv_blocks[position] * list.block_kv;
  }
  static CUFLASH_DEVICE int block(const WorkList& list) { return list.block_kv; }
  static CUFLASH_DEVICE int length(const Shape& shape) { return shape.seqlen_kv; }
};
struct OverQBlocks {
  static CUFLASH_DEVICE int entry(const WorkList& list, int position) { return list.column_entries[position]; }
  static CUFLASH_DEVICE BlockKind kind(const WorkList& list, int position) {
    return static_cast<BlockKind>(list.column_steps[position] % 4);
  }
  static CUFLASH_DEVICE int first(const WorkList& list, int position) {
    return list.column_steps[position] / 4 * list.block_q;
  }
  static CUFLASH_DEVICE int block(const WorkList& list) { return list.block_q; }
  static CUFLASH_DEVICE int length(const Shape& shape) { return shape.seqlen_q; }
};

// Return the start of one of `num_parts` even parts of `total` items; a part ends where the next one starts.
CUFLASH_DEVICE int split_start(int total, int part, int num_parts) {
  return total / num_parts * part + min(part, total % num_parts);
}

// Return one of `num_parts` parts of the visit range of a tile of queries: a part of its listed blocks, or of its steps
// of Width keys.
template <int Width, class Listed>
CUFLASH_DEVICE VisitRange split_range(const Params& params, const VisitRange& full_range, int part, int num_parts) {
  VisitRange visit_range = full_range;
  if (Listed::has_list(params.work)) {
    const int num_entries = full_range.last_entry - full_range.first_entry;
    visit_range.first_entry = full_range.first_entry + split_start(num_entries, part, num_parts);
    visit_range.last_entry = full_range.first_entry + split_start(num_entries, part + 1, num_parts);
  } else {
    const int num_steps = (max(full_range.stop - full_range.start, 0) + Width - 1) / Width;
    visit_range.start = full_range.start + Width * split_start(num_steps, part, num_parts);
    visit_range.stop = min(full_range.stop, full_range.start + Width * split_start(num_steps, part + 1, num_parts));
  }
  return visit_range;
}

// An iterator over the visit range of a tile in steps of at most Width rows or, if there is a list, over the listed
// blocks. It does not copy the range, which stays in registers or in shared memory. If IsReversed, it visits the same
// steps from the last to the first; of a list, it reverses the steps of each block.
template <int Width, class Walk, class Listed = DynamicListed, bool IsReversed = false>
class BlockIterator {
 public:
  CUFLASH_DEVICE BlockIterator(const Params& params, const VisitRange& visit_range)
      : params_(params), visit_range_(visit_range), position_(visit_range.start), end_(visit_range.stop) {
    if (!Listed::has_list(params.work)) return;
    position_in_list_ = visit_range.first_entry;
    position_ = end_ = 0;
  }

  CUFLASH_DEVICE bool has_next() {
    while (position_ >= end_) {
      if (!Listed::has_list(params_.work) || position_in_list_ >= visit_range_.last_entry) return false;
      open_block(position_in_list_++);
    }
    return true;
  }

  CUFLASH_DEVICE bool next(KvBlock& block) {
    if (!has_next()) return false;
    block.start = IsReversed ? position_ + (end_ - position_ - 1) / Width * Width : position_;
    block.stop = min(block.start + Width, end_);
    block.kind = kind_;
    block.entry = entry_;
    if (kind_ == BlockKind::kInterval && block.start >= visit_range_.full_start && block.stop <= visit_range_.full_stop)
      block.kind = BlockKind::kFull;
    if (IsReversed) end_ = block.start;
    else position_ = block.stop;
    return true;
  }

 private:
  // Open the listed block at a position of the list. A block of intervals is clipped to the tile's range.
  CUFLASH_DEVICE void open_block(int position) {
    const WorkList& list = params_.work;
    entry_ = Walk::entry(list, position);
    kind_ = Walk::kind(list, position);
    position_ = Walk::first(list, position);
    end_ = min(position_ + Walk::block(list), Walk::length(params_.shape));
    if (kind_ == BlockKind::kInterval) {
      position_ = max(position_, visit_range_.start);
      end_ = min(end_, visit_range_.stop);
    }
  }

  const Params& params_;
  const VisitRange& visit_range_;
  int position_, end_;
  BlockKind kind_ = BlockKind::kInterval;
  int position_in_list_ = 0;
  int entry_ = -1;
};

// Move a short last step to an earlier start, unless it ends at the end of the matrix or the tile's range is too short.
// Without this, rows past the step would hold arbitrary values, and 0 times NaN is not 0. Past the end of the matrix,
// TMA writes zeros.
template <int Width, bool IsListed>
CUFLASH_DEVICE bool shift_short_block(KvBlock& block, const VisitRange& visit_range, int length) {
  const bool is_shifted =
      !IsListed && block.stop - block.start < Width && block.stop < length && block.stop - Width >= visit_range.start;
  if (is_shifted) block.start = block.stop - Width;
  return is_shifted;
}

}  // namespace cuflash::attention
