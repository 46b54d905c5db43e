#pragma once
#include <attention/params.cuh>

// The parameters of kernels that work on a KV cache. cuflash/planning/decoding.py has the same records as NumPy dtypes.
namespace cuflash::attention {

// Keys and values of several sequences, in pages of `page_size` positions. A contiguous cache has one page per
// sequence.
struct CachePages {
  Matrices k, v;  // [num_pages, kv heads, page_size, dim]
  const int32_t* table;  // [batch, max_pages] the pages of each sequence; if null, page b belongs to sequence b
  int32_t* lengths;  // [batch] number of positions of each sequence
  const int32_t* counts;  // [batch] number of new rows that belong to each sequence; if null, all do
  int32_t* num_faults;  // count of out-of-range values in the three arrays above
  int32_t batch, num_pages, max_pages, page_size;
  int32_t capacity, num_kv_heads, head_dim, value_dim;
};

struct Decode {
  Matrices q, o, lse;  // [batch, query heads, num_queries, dim]
  CachePages cache;
  float* o_parts;  // [batch, kv heads, max_parts, group_size * num_queries, room for value_dim]
  float* stats_parts;  // [batch, kv heads, max_parts, group_size * num_queries, 2] maximum and sum of each row
  int32_t* arrivals;  // [batch, kv heads] number of parts that are written; 0 before and after a launch
  int32_t group_size, num_queries, max_parts;
  int32_t left, right;  // numbers of keys that a query sees before and after its own position
  double softmax_scale;
};

// Memory for partial results, for kernels whose keys are in arrays instead of a cache. The members are those of Decode.
struct DecodeParts {
  float* o_parts;
  float* stats_parts;
  int32_t* arrivals;
};

}  // namespace cuflash::attention
