#pragma once
#include <attention/block_iterator.cuh>
#include <sm90/constants.cuh>
#include <tile/range.cuh>

// Tiles, of queries and of keys, that start and end with packed sequences, in the backward pass. Arrays of the work
// list have the first rows of the tiles, in the order of cuflash/blocks/sequence_tiles.py. A tile may be empty.
namespace cuflash::sm90 {

// The first rows of the tiles of a batch entry and head, followed by the length. A tile has at most Height rows.
template <int Height>
struct SequenceParts {
  const int32_t* starts;
  int num_tiles, length;

  static CUFLASH_DEVICE SequenceParts of_queries(const Params& params, const BatchHead& batch_head) {
    const WorkList& list = params.work;
    return {list.q_blocks + list_index(list, batch_head) * (list.num_q_blocks + 1), list.num_q_blocks,
            params.shape.seqlen_q};
  }
  // Return the tiles of keys. Query heads that share keys have the tiles of the first of these heads.
  static CUFLASH_DEVICE SequenceParts of_keys(const Params& params, BatchHead batch_head) {
    const WorkList& list = params.work;
    batch_head.head -= batch_head.head % params.shape.group_size;
    return {list.kv_blocks + list_index(list, batch_head) * (list.num_kv_blocks + 1), list.num_kv_blocks,
            params.shape.seqlen_kv};
  }

  CUFLASH_DEVICE int first(int number) const { return starts[number]; }
  // A tile never has more than Height rows, whatever the offsets are.
  CUFLASH_DEVICE int last(int number) const { return min(starts[number + 1], starts[number] + Height); }

  // Return the index of the tile that contains a row, or num_tiles if no tile contains it. Called by a warp.
  CUFLASH_DEVICE int find(int row) const {
    for (int from = row / Height; from < num_tiles; from += 32) {  // earlier tiles have at most Height rows each
      const uint32_t is_behind = __ballot_sync(0xffffffffu, starts[min(from + ptx::lane() + 1, num_tiles)] > row);
      if (is_behind != 0) return from + __ffs(is_behind) - 1;
    }
    return num_tiles;
  }
};

// Return the number of tiles of Height keys that visit a tile of queries: those with rows between the first key that
// the first query sees and the last key that the last query sees. Called by a warp.
template <int Height>
CUFLASH_DEVICE int num_visiting_parts(const Params& params, const WorkTile& queries) {
  const auto keys = SequenceParts<Height>::of_keys(params, queries.batch_head);
  const int lo = interval(params, queries.batch_head, queries.first).lo,
            hi = interval(params, queries.batch_head, queries.last - 1).hi;
  // the number of a sequence's tiles exceeds its length divided by Height by at most one
  const int end = min(keys.num_tiles, hi / Height + 1 + keys.num_tiles - keys.length / Height);
  return tile::warp_sum(lo / Height, end, [&](int number) {
    const int first = keys.first(number), last = keys.last(number);
    return first < last && first < hi && last > lo;
  });
}

// A tile of queries or of keys, and its index within its matrix.
struct SequencePart {
  WorkTile work;
  int number;
};

// Return the tile of queries that a thread block works on, in reverse order, like `query_tile_reversed`.
template <int Height>
CUFLASH_DEVICE SequencePart query_part_reversed(const Params& params) {
  const TileAxis numbers{params.work.num_q_blocks, 1, 0, nullptr, true, params.shape.heads_per_l2_group};
  const TileScheduler scheduler(params.shape, numbers, 1);
  const int rank = scheduler.num_batch_heads * scheduler.num_tiles - 1 - blockIdx.x;
  SequencePart part{work_tile(params, numbers, scheduler, 1, tile_order_at(numbers, scheduler, rank))};
  const auto queries = SequenceParts<Height>::of_queries(params, part.work.batch_head);
  part.number = part.work.first;
  part.work.first = queries.first(part.number);
  part.work.last = queries.last(part.number);
  return part;
}

// Return the axis of keys, divided into tiles. Blocks take the tiles of a head in order of length, the longest first.
CUFLASH_DEVICE TileAxis key_parts(const Params& params) {
  return {params.work.num_kv_blocks,         params.shape.group_size, 1, params.work.column_entries, false,
          params.shape.kv_heads_per_l2_group};
}
// Return the number of tiles of keys, for persistent blocks. The second function returns the tile with a rank in that
// order.
CUFLASH_DEVICE int num_key_parts(const Params& params) {
  const TileScheduler scheduler(params.shape, key_parts(params), 1);
  return scheduler.num_batch_heads * scheduler.num_tiles;
}
template <int Height>
CUFLASH_DEVICE WorkTile key_part_at(const Params& params, int rank) {
  WorkTile work = work_tile(params, key_parts(params), 1, rank);
  const auto keys = SequenceParts<Height>::of_keys(params, work.batch_head);
  const int number = work.first;
  work.first = keys.first(number);
  work.last = keys.last(number);
  return work;
}

// The queries that attend to a tile of keys: a range of rows, and the tiles that contain them, from index first_entry
// on.
template <int Height>
struct PartRange : VisitRange {
  SequenceParts<Height> parts;
};

// An iterator over the tiles of queries that attend to a tile of keys. The `entry` of a block is the tile's index.
template <int Height>
class PartIterator {
 public:
  CUFLASH_DEVICE PartIterator(const Params&, const PartRange<Height>& visit_range)
      : visit_range_(visit_range), number_(visit_range.first_entry) {}

  CUFLASH_DEVICE bool next(KvBlock& block) {
    for (; number_ < visit_range_.parts.num_tiles; ++number_) {
      const int start = visit_range_.parts.first(number_), stop = visit_range_.parts.last(number_);
      if (start >= visit_range_.stop) return false;
      if (start >= stop) continue;
      const bool is_full = start >= visit_range_.full_start && stop <= visit_range_.full_stop;
      block = {start, stop, is_full ? BlockKind::kFull : BlockKind::kInterval, number_++};
      return true;
    }
    return false;
  }

 private:
  const PartRange<Height>& visit_range_;
  int number_;
};

}  // namespace cuflash::sm90
