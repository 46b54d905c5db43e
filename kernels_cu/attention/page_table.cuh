#pragma once
#include <attention/block_iterator.cuh>

// Keys and values that lie in the pages of a KV cache: which page holds a position. cuflash/planning/prefill.py has the record as
// a NumPy dtype.
namespace cuflash::attention {

// The parameters of a kernel whose specification is paged, an argument of its own. K and V of Params are stacks of pages then,
// [num_pages, kv heads, page_size, dim], and a batch entry is a sequence. A contiguous cache has one page a sequence.
struct Pages {
  const int32_t* table;    // [batch, max_pages] the pages of each sequence; null: page b is sequence b's
  const int32_t* lengths;  // [batch] positions of each sequence
  const int32_t* counts;   // [batch] how many of the queries belong to each sequence; null: all of them
  int32_t* num_faults;     // of what is read from the three arrays above, how often it was out of range
  int32_t num_pages, max_pages, page_size, capacity;
  int32_t num_queries;  // of each sequence, in use or not
  int32_t box_rows;     // rows of a page that one copy of the tensor memory accelerator brings
};

// The argument as functions take it; other kernels have none, and hand over the constant in its place.
struct NoPages {};
template <bool IsPaged>
struct PagesArgumentIf {
  using Type = const Pages&;
};
template <>
struct PagesArgumentIf<false> {
  using Type = NoPages;
};
using PagesArgument = PagesArgumentIf<config::kIsPaged>::Type;
constexpr NoPages pages{};

// The queries of a sequence are its last positions.
struct SequenceRows {
  int length, count;  // positions, and queries that belong to it
  bool is_valid;      // both numbers were in their range
};
CUFLASH_DEVICE SequenceRows rows_of_sequence(const Pages& pages, int sequence) {
  const int length = pages.lengths[sequence], count = pages.counts == nullptr ? pages.num_queries : pages.counts[sequence];
  const int clamped = min(max(length, 0), pages.capacity), clamped_count = min(max(count, 0), pages.num_queries);
  return {clamped, clamped_count, length == clamped && count == clamped_count};
}

// The page of a position; `num_pages`, which no page has, where the table names none.
CUFLASH_DEVICE int page_of(const Pages& pages, int sequence, int position) {
  if (pages.table == nullptr) return sequence;
  const int number = divmod(position, pages.page_size).quotient;
  const int page = pages.table[static_cast<int64_t>(sequence) * pages.max_pages + number];
  return page >= 0 && page < pages.num_pages ? page : pages.num_pages;
}

// A tile of queries, which start at its sequence's first one, without those that belong to no sequence.
template <class Listed>
CUFLASH_DEVICE WorkTile query_tile_of_sequence(const Params& params, const Pages& pages, int height, int number) {
  WorkTile work = work_tile(params, query_axis<Listed>(params), height, number);
  work.last = min(work.last, rows_of_sequence(pages, work.batch_head.batch_index).count);
  return work;
}

// Have steps start at multiples of their width, whatever the queries see: so no page decides how a sum is cut. The first key that
// one of them sees is kept in the place of the first entry of a list, of which there is none.
CUFLASH_DEVICE void align_steps(VisitRange& visit_range, int width) {
  visit_range.first_entry = visit_range.start;
  visit_range.start -= visit_range.start % width;
}
CUFLASH_DEVICE int first_key(const VisitRange& visit_range) { return visit_range.first_entry; }

}  // namespace cuflash::attention
