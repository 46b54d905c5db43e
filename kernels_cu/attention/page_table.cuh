#pragma once
#include <attention/block_iterator.cuh>
#include <attention/feature_argument.cuh>

// Keys and values in the pages of a KV cache: which page holds a position. cuflash/planning/prefill.py has the record
// as a NumPy dtype.
namespace cuflash::attention {

// A kernel argument, in kernels whose specification is paged. K and V of Params are then stacks of pages [num_pages, kv
// heads, page_size, dim], and a batch entry is a sequence. A contiguous cache has one page per sequence.
struct Pages {
  const int32_t* table;  // [batch, max_pages] the pages of each sequence; if null, page b belongs to sequence b
  const int32_t* lengths;  // [batch] number of positions of each sequence
  const int32_t* counts;  // [batch] number of queries that belong to each sequence; if null, all do
  int32_t* num_faults;  // count of out-of-range values in the three arrays above
  int32_t num_pages, max_pages, page_size, capacity;
  int32_t num_queries;  // number of rows per sequence, including unused rows
  int32_t box_rows;  // rows of a page that one TMA copy loads
};

struct NoPages {};
template <class Config>
using PagesArgument = FeatureArgument<Config::kIsPaged, Pages, NoPages>;
constexpr NoPages pages{};

// The rows of a sequence. Its queries are its last positions.
struct SequenceRows {
  int length, count;  // number of positions, and number of queries
  bool is_valid;  // whether both numbers are in range
};
CUFLASH_DEVICE SequenceRows rows_of_sequence(const Pages& pages, int sequence) {
  const int length = pages.lengths[sequence];
  const int count = pages.counts == nullptr ? pages.num_queries : pages.counts[sequence];
  const int clamped = min(max(length, 0), pages.capacity), clamped_count = min(max(count, 0), pages.num_queries);
  return {clamped, clamped_count, length == clamped && count == clamped_count};
}

// A map from a query of a sequence to its position, which is at least 0. Without pages, the position equals the query.
template <bool IsPaged>
struct QueryPositionIf {
  QueryPositionIf() = default;
  CUFLASH_DEVICE QueryPositionIf(NoPages, int) {}
  CUFLASH_DEVICE int operator()(int query) const { return query; }
};
template <>
struct QueryPositionIf<true> {
  QueryPositionIf() = default;
  CUFLASH_DEVICE QueryPositionIf(const Pages& pages, int sequence) {
    const SequenceRows of = rows_of_sequence(pages, sequence);
    first_ = of.length - of.count;
  }
  CUFLASH_DEVICE int operator()(int query) const { return max(0, first_ + query); }

 private:
  int first_;
};
template <class Config>
using QueryPosition = QueryPositionIf<Config::kIsPaged>;

// Return the page of a position, or `num_pages` if the table has no valid page for it.
CUFLASH_DEVICE int page_of(const Pages& pages, int sequence, int position) {
  if (pages.table == nullptr) return sequence;
  const int number = divmod(position, pages.page_size).quotient;
  const int page = pages.table[static_cast<int64_t>(sequence) * pages.max_pages + number];
  return page >= 0 && page < pages.num_pages ? page : pages.num_pages;
}

// Return a tile of queries. Tiles start at the first query of their sequence, and end before queries that belong to no
// sequence.
template <class Listed>
CUFLASH_DEVICE WorkTile query_tile_of_sequence(const Params& params, const Pages& pages, int height, int number) {
  WorkTile work = work_tile(params, query_axis<Listed>(params), height, number);
  work.last = min(work.last, rows_of_sequence(pages, work.batch_head.batch_index).count);
  return work;
}

// Align the steps of a visit range to multiples of their width, whichever keys the queries see, so that the partition
// of a sum does not depend on the pages. `first_entry`, which is unused without a list, stores the first key that a
// query sees.
CUFLASH_DEVICE void align_steps(VisitRange& visit_range, int width) {
  visit_range.first_entry = visit_range.start;
  visit_range.start -= visit_range.start % width;
}
CUFLASH_DEVICE int first_key(const VisitRange& visit_range) { return visit_range.first_entry; }

}  // namespace cuflash::attention
