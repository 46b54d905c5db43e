#pragma once
#include <lists/selection.cuh>

// The parameters of the kernels that choose pages of a KV cache by bounds of their scores: lists_page_scores computes
// the bounds from the least and greatest keys that the cache keeps, and lists_page_choice makes the lists.
// cuflash/planning/page_choice.py has the same record as a NumPy dtype.
namespace cuflash::lists {

struct PageChoice {
  StridedRows q;  // [batch, heads, queries, columns]; the last batch axis is that of sequences
  const void* key_bounds;  // [num_pages, kv heads, 2, columns], in the dtype of q
  const int32_t* table;  // [batch, max_pages] the pages of each sequence
  const int32_t* lengths;  // [batch] number of positions of each sequence
  void* scores;  // accumulators [batch, lists, queries, max_pages]
  Choice choice;  // of the longest sequence, without arrays of scores and shares; a row for each query of each list
  double scale;  // a factor of q
  int32_t batch, num_heads, num_kv_heads, heads_of_list, num_queries, num_columns;
  int32_t num_pages, max_pages, page_size, capacity;
  int32_t is_bottom_right;  // whether the last query is at the last position of its sequence
  int32_t padding;

  CUFLASH_DEVICE int num_lists() const { return num_heads / heads_of_list; }
  CUFLASH_DEVICE int length_of(int sequence) const { return max(0, min(lengths[sequence], capacity)); }
  CUFLASH_DEVICE int num_pages_of(int sequence) const { return (length_of(sequence) + page_size - 1) / page_size; }
};

}  // namespace cuflash::lists
