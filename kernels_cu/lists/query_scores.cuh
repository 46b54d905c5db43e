#pragma once
#include <lists/selection.cuh>

// The parameters of lists_query_scores. cuflash/planning/query_scores.py has the same record as a NumPy dtype.
namespace cuflash::lists {

struct QueryScores {
  StridedRows q, k;  // queries, and keys that each represent a run of keys
  StridedRows lse;  // lse of the scores of all keys of a query, or null
  Choice choice;  // has a row for each query of each list; this kernel computes its scores and shares
  double scale_log2;  // the softmax scale times log2(e)
  int32_t batch[3];
  int32_t num_heads, group_size;  // number of query heads, and number of those that share a key/value head
  int32_t heads_of_list;  // number of query heads that share a list: 1 or group_size
  int32_t num_keys, num_columns;  // number of keys per head, and of columns per key
  int32_t step, length;  // with `choice.is_causal`, a query sees key n if it attends key n * step + length - 1
  int32_t num_parts, parts_of_block;  // key n represents the parts n to n + num_parts - 1
  int32_t sums_weights;  // whether scores are sums of softmax weights over heads and parts instead of products
  int32_t has_shares;  // whether the scores are also the shares
  int32_t place_columns;  // number of columns for whose places each warp has shared memory, a multiple of 32
  int32_t queries_per_tile;
  int32_t keeps_places;  // whether places have memory after the scores; otherwise they replace the tiles of keys
  int32_t uses_lanes;  // two lanes choose from a row, if the choice has only a number of blocks
};

}  // namespace cuflash::lists
