#pragma once
#include <attention/work_tile.cuh>

// What a tile visits, step by step, and which elements of a step are allowed.
namespace cuflash::attention {

enum class Kind : int { kFull = 1, kInterval = 2, kBits = 3 };

struct Interval {
  int lo, hi;
};

CUFLASH_DEVICE int clipped(int64_t x, int length) { return x < 0 ? 0 : x > length ? length : static_cast<int>(x); }

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
  const uint8_t* bits;       // of the listed block, where they say it
  int first_row, first_key;  // of the listed block
  int pitch;                 // bytes of a row of bits

  // Asked once for a row: what it takes to find out would otherwise be most of a kernel's text.
  CUFLASH_DEVICE Seen seen(const Params& params, const Place& place, int i) const {
    const int length = params.shape.seqlen_kv;
    if (kind == Kind::kFull) return {0, length, nullptr, 0};
    if (kind == Kind::kBits) return {0, length, bits + (i - first_row) * pitch, first_key};
    const Interval keys = interval(params, place, i);
    return {keys.lo, keys.hi, nullptr, 0};
  }
  CUFLASH_DEVICE bool is_allowed(const Params& params, const Place& place, int i, int j) const {
    return seen(params, place, i).has(j);
  }
};

// Steps of at most Width over start <= x < stop, of which full_start <= x < full_stop needs no mask; then over the
// listed blocks, if there is a list.
template <int Width>
class Steps {
 public:
  // The keys that a tile of queries visits.
  static CUFLASH_DEVICE Steps of_queries(const Params& params, const WorkTile& tile) {
    const Work& work = params.work;
    const Interval first = interval(params, tile.place, tile.first), last = interval(params, tile.place, tile.last - 1);
    Steps steps{params, first.lo, last.hi, last.lo, first.hi};
    if (work.row_pointers != nullptr) {
      const int row = tile.first / work.block_q;
      steps.use_list(work.row_pointers + list_matrix(work, tile.place) * work.num_q_blocks + row, nullptr,
                     work.kv_blocks, work.block_kv, params.shape.seqlen_kv);
    }
    return steps;
  }

  // The queries of one head that visit a tile of keys.
  static CUFLASH_DEVICE Steps of_keys(const Params& params, const WorkTile& tile) {
    const Work& work = params.work;
    Steps steps{params, rows_ending_by(params, tile.place, tile.first), rows_starting_by(params, tile.place, tile.last - 1),
                rows_ending_by(params, tile.place, tile.last - 1), rows_starting_by(params, tile.place, tile.first)};
    if (work.row_pointers != nullptr) {
      const int column = tile.first / work.block_kv;
      steps.use_list(work.column_pointers + list_matrix(work, tile.place) * work.num_kv_blocks + column,
                     work.column_entries, work.q_blocks, work.block_q, params.shape.seqlen_q);
    }
    return steps;
  }

  CUFLASH_DEVICE bool next(Step& step) {
    while (position_ >= end_) {
      if (place_ >= last_place_) return false;
      open(place_++);
    }
    step.start = position_;
    step.stop = min(position_ + Width, end_);
    step.kind = kind_;
    if (kind_ == Kind::kInterval && step.start >= full_start_ && step.stop <= full_stop_) step.kind = Kind::kFull;
    step.bits = bits_;
    step.first_row = first_row_;
    step.first_key = first_key_;
    step.pitch = (params_.work.block_kv + 7) / 8;
    position_ = step.stop;
    return true;
  }

 private:
  CUFLASH_DEVICE Steps(const Params& params, int start, int stop, int full_start, int full_stop)
      : params_(params), start_(start), stop_(stop), full_start_(full_start), full_stop_(full_stop), position_(start),
        end_(stop) {}

  // How many rows end, or start, at or before a key: neither lo nor hi ever decreases.
  static CUFLASH_DEVICE int rows_ending_by(const Params& params, const Place& place, int key) {
    if (params.work.lo == nullptr) return clipped(key - params.work.upper, params.shape.seqlen_q);
    int first = 0, last = params.shape.seqlen_q;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (interval(params, place, middle).hi <= key) first = middle + 1;
      else last = middle;
    }
    return first;
  }
  static CUFLASH_DEVICE int rows_starting_by(const Params& params, const Place& place, int key) {
    if (params.work.lo == nullptr) return clipped(key - params.work.lower + 1, params.shape.seqlen_q);
    int first = 0, last = params.shape.seqlen_q;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (interval(params, place, middle).lo <= key) first = middle + 1;
      else last = middle;
    }
    return first;
  }

  CUFLASH_DEVICE void use_list(const int32_t* pointers, const int32_t* entries, const int32_t* blocks, int block,
                               int length) {
    place_ = pointers[0];
    last_place_ = pointers[1];
    entries_ = entries;
    blocks_ = blocks;
    block_ = block;
    length_ = length;
    position_ = end_ = 0;
  }

  // The next listed block; one of intervals is cut to the hull of the tile's.
  CUFLASH_DEVICE void open(int place) {
    const Work& work = params_.work;
    const int entry = entries_ == nullptr ? place : entries_[place];
    kind_ = static_cast<Kind>(work.kinds[entry]);
    position_ = blocks_[entry] * block_;
    end_ = min(position_ + block_, length_);
    if (kind_ == Kind::kInterval) {
      position_ = max(position_, start_);
      end_ = min(end_, stop_);
    } else if (kind_ == Kind::kBits) {
      bits_ = work.bits + static_cast<int64_t>(work.tiles[entry]) * work.block_q * ((work.block_kv + 7) / 8);
      first_row_ = work.q_blocks[entry] * work.block_q;
      first_key_ = work.kv_blocks[entry] * work.block_kv;
    }
  }

  const Params& params_;
  int start_, stop_, full_start_, full_stop_;
  int position_, end_;
  Kind kind_ = Kind::kInterval;
  int place_ = 0, last_place_ = 0;  // in the list
  const int32_t* entries_ = nullptr;
  const int32_t* blocks_ = nullptr;
  int block_ = 0, length_ = 0;
  const uint8_t* bits_ = nullptr;
  int first_row_ = 0, first_key_ = 0;
};

}  // namespace cuflash::attention
