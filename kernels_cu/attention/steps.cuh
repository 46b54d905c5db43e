#pragma once
#include <attention/work_tile.cuh>

// What a tile visits, step by step, and which elements of a step are allowed.
namespace cuflash::attention {

enum class Kind : int { kFull = 1, kInterval = 2, kBits = 3 };

struct Interval {
  int lo, hi;
};

CUFLASH_DEVICE int clipped(int64_t x, int length) { return x < 0 ? 0 : x > length ? length : static_cast<int>(x); }

// A place along a sequence as an int, or one further out than any.
CUFLASH_DEVICE int bounded(int64_t x) {
  constexpr int64_t kFar = 1 << 30;
  return static_cast<int>(max(min(x, kFar), -kFar));
}

// The keys lo <= j < hi of query i, where a mask says it by intervals.
CUFLASH_DEVICE Interval interval(const Params& params, const Place& place, int i) {
  const Work& work = params.work;
  const int length = params.shape.seqlen_kv;
  if (work.lo == nullptr) return {clipped(i + work.lower, length), clipped(i + work.upper + 1, length)};
  const int64_t at = place.entry * work.interval_batch_stride + place.head * work.interval_head_stride + i;
  return {clipped(work.lo[at], length), clipped(work.hi[at], length)};
}

// Which keys a query sees in a step: lo <= j < hi, and of them those whose bits are 1, where there are bits.
struct Seen {
  int lo, hi;
  const uint8_t* bits;  // from first_key on
  int first_key;

  CUFLASH_DEVICE bool has(int j) const {
    if (j < lo || j >= hi) return false;
    if (bits == nullptr) return true;
    const unsigned key = j - first_key;
    return bits[key / 8] >> key % 8 & 1;
  }
};

// Rows or keys start <= x < stop under one kind of mask.
struct Step {
  int start, stop;
  Kind kind;
  int entry;  // of the list, where bits say it

  // Asked once for a row: what it takes to find out would otherwise be most of a kernel's text.
  CUFLASH_DEVICE Seen seen(const Params& params, const Place& place, int i) const {
    const int length = params.shape.seqlen_kv;
    if (kind == Kind::kFull) return {0, length, nullptr, 0};
    if (kind == Kind::kBits) {
      const Work& work = params.work;
      const int64_t row = static_cast<int64_t>(work.tiles[entry]) * work.block_q + i - work.q_blocks[entry] * work.block_q;
      return {0, length, work.bits + row * ((work.block_kv + 7) / 8),
              work.kv_blocks[entry] * work.block_kv};
    }
    const Interval keys = interval(params, place, i);
    return {keys.lo, keys.hi, nullptr, 0};
  }
  CUFLASH_DEVICE bool is_allowed(const Params& params, const Place& place, int i, int j) const {
    return seen(params, place, i).has(j);
  }
};

// How far a tile's rows, or keys, reach: start <= x < stop, of which full_start <= x < full_stop needs no mask; and its
// places first_place <= x < last_place in the list, if there is one.
struct Reach {
  int start, stop, full_start, full_stop;
  int first_place, last_place;
};

// The keys that a tile of queries may visit.
CUFLASH_DEVICE Reach reach_of_queries(const Params& params, const WorkTile& tile) {
  const Interval first = interval(params, tile.place, tile.first), last = interval(params, tile.place, tile.last - 1);
  Reach reach{first.lo, last.hi, last.lo, first.hi};
  const Work& work = params.work;
  if (work.row_pointers != nullptr) {
    const int32_t* const row =
        work.row_pointers + list_matrix(work, tile.place) * work.num_q_blocks + divided(tile.first, work.block_q).quotient;
    reach.first_place = row[0];
    reach.last_place = row[1];
  }
  return reach;
}

// How many rows end, or start, at or before a key: neither lo nor hi ever decreases.
CUFLASH_DEVICE int rows_ending_by(const Params& params, const Place& place, int key) {
  if (params.work.lo == nullptr) return clipped(key - params.work.upper, params.shape.seqlen_q);
  int first = 0, last = params.shape.seqlen_q;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (interval(params, place, middle).hi <= key) first = middle + 1;
    else last = middle;
  }
  return first;
}
CUFLASH_DEVICE int rows_starting_by(const Params& params, const Place& place, int key) {
  if (params.work.lo == nullptr) return clipped(key - params.work.lower + 1, params.shape.seqlen_q);
  int first = 0, last = params.shape.seqlen_q;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (interval(params, place, middle).lo <= key) first = middle + 1;
    else last = middle;
  }
  return first;
}

// The places of a tile of keys in the list, if there is one.
CUFLASH_DEVICE void find_places(const Params& params, const WorkTile& tile, Reach& reach) {
  const Work& work = params.work;
  if (work.column_pointers == nullptr) return;
  const int32_t* const column =
      work.column_pointers + list_matrix(work, tile.place) * work.num_kv_blocks + divided(tile.first, work.block_kv).quotient;
  reach.first_place = column[0];
  reach.last_place = column[1];
}

// The queries of one head that may visit a tile of keys.
CUFLASH_DEVICE Reach reach_of_keys(const Params& params, const WorkTile& tile) {
  Reach reach{rows_ending_by(params, tile.place, tile.first), rows_starting_by(params, tile.place, tile.last - 1),
              rows_ending_by(params, tile.place, tile.last - 1), rows_starting_by(params, tile.place, tile.first)};
  find_places(params, tile, reach);
  return reach;
}

// The same, but that it starts where a tile of queries does, as `work_tile` cuts them.
CUFLASH_DEVICE Reach from_whole_tiles(const Params& params, Reach reach, int height) {
  const int within = params.work.row_pointers != nullptr ? divided(reach.start, params.work.block_q).rest : reach.start;
  reach.start -= within % height;
  return reach;
}

// What the steps of a tile of queries, or of keys, run over.
struct OverKeys {
  static CUFLASH_DEVICE int entry(const Work&, int place) { return place; }
  static CUFLASH_DEVICE Kind kind(const Work& work, int place) { return static_cast<Kind>(work.kinds[place]); }
  static CUFLASH_DEVICE int first(const Work& work, int place) { return work.kv_blocks[place] * work.block_kv; }
  static CUFLASH_DEVICE int block(const Work& work) { return work.block_kv; }
  static CUFLASH_DEVICE int length(const Shape& shape) { return shape.seqlen_kv; }
};
struct OverQueries {
  static CUFLASH_DEVICE int entry(const Work& work, int place) { return work.column_entries[place]; }
  static CUFLASH_DEVICE Kind kind(const Work& work, int place) { return static_cast<Kind>(work.column_steps[place] % 4); }
  static CUFLASH_DEVICE int first(const Work& work, int place) { return work.column_steps[place] / 4 * work.block_q; }
  static CUFLASH_DEVICE int block(const Work& work) { return work.block_q; }
  static CUFLASH_DEVICE int length(const Shape& shape) { return shape.seqlen_q; }
};

// Where a part of `total` things starts, which parts share evenly; it ends where the next one starts.
CUFLASH_DEVICE int part_start(int total, int part, int num_parts) {
  return total / num_parts * part + min(part, total % num_parts);
}

// One of several parts of what a tile of queries reaches: of listed blocks, or of steps of Width keys.
template <int Width, class Listed>
CUFLASH_DEVICE Reach part_of(const Params& params, const Reach& whole, int part, int num_parts) {
  Reach reach = whole;
  if (Listed::in(params.work)) {
    const int num_places = whole.last_place - whole.first_place;
    reach.first_place = whole.first_place + part_start(num_places, part, num_parts);
    reach.last_place = whole.first_place + part_start(num_places, part + 1, num_parts);
  } else {
    const int num_steps = (max(whole.stop - whole.start, 0) + Width - 1) / Width;
    reach.start = whole.start + Width * part_start(num_steps, part, num_parts);
    reach.stop = min(whole.stop, whole.start + Width * part_start(num_steps, part + 1, num_parts));
  }
  return reach;
}

// Steps of at most Width over what a tile reaches; over the listed blocks, if there is a list. The reach stays where it
// is, in registers or in shared memory.
template <int Width, class Side, class Listed = ListedAtRunTime>
class Steps {
 public:
  CUFLASH_DEVICE Steps(const Params& params, const Reach& reach)
      : params_(params), reach_(reach), position_(reach.start), end_(reach.stop) {
    if (!Listed::in(params.work)) return;
    place_ = reach.first_place;
    position_ = end_ = 0;
  }

  CUFLASH_DEVICE bool has_next() {
    while (position_ >= end_) {
      if (!Listed::in(params_.work) || place_ >= reach_.last_place) return false;
      open(place_++);
    }
    return true;
  }

  CUFLASH_DEVICE bool next(Step& step) {
    if (!has_next()) return false;
    step.start = position_;
    step.stop = min(position_ + Width, end_);
    step.kind = kind_;
    step.entry = entry_;
    if (kind_ == Kind::kInterval && step.start >= reach_.full_start && step.stop <= reach_.full_stop)
      step.kind = Kind::kFull;
    position_ = step.stop;
    return true;
  }

 private:
  // The next listed block; one of intervals is cut to the tile's reach.
  CUFLASH_DEVICE void open(int place) {
    const Work& work = params_.work;
    entry_ = Side::entry(work, place);
    kind_ = Side::kind(work, place);
    position_ = Side::first(work, place);
    end_ = min(position_ + Side::block(work), Side::length(params_.shape));
    if (kind_ == Kind::kInterval) {
      position_ = max(position_, reach_.start);
      end_ = min(end_, reach_.stop);
    }
  }

  const Params& params_;
  const Reach& reach_;
  int position_, end_;
  Kind kind_ = Kind::kInterval;
  int place_ = 0;  // in the list
  int entry_ = -1;
};

// A last step that is short, and is not the matrix's end, where the accelerator writes zeros: it starts earlier instead, if
// the tile reaches as far. What lies past it may be anything, and 0 times that is not 0.
template <int Width, bool IsListed>
CUFLASH_DEVICE bool widen(Step& step, const Reach& reach, int length) {
  const bool is_wider =
      !IsListed && step.stop - step.start < Width && step.stop < length && step.stop - Width >= reach.start;
  if (is_wider) step.start = step.stop - Width;
  return is_wider;
}

}  // namespace cuflash::attention
