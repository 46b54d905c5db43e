#pragma once
#include <attention/block_iterator.cuh>
#include <attention/tiling.cuh>

// Access to a matrix of scores that is stored as a whole, for naive kernels, which may read any tile of it.
namespace cuflash::attention {

// Find the step of a tile of scores; the tile lies within one block of a list. Return false if that block is absent.
CUFLASH_DEVICE bool find_block(const Params& params, const BatchHead& batch_head, Range queries, Range keys,
                               KvBlock& block) {
  const WorkList& list = params.work;
  block = {keys.first, keys.last, BlockKind::kInterval, -1};
  if (list.row_pointers == nullptr) return true;
  const int32_t* const row =
      list.row_pointers + list_index(list, batch_head) * list.num_q_blocks + queries.first / list.block_q;
  const int kv_block = keys.first / list.block_kv, end = row[1];
  int entry = row[0];
  for (int last = end; entry < last;) {  // key blocks increase along a row of blocks
    const int middle = (entry + last) / 2;
    if (list.kv_blocks[middle] < kv_block) entry = middle + 1;
    else last = middle;
  }
  if (entry == end || list.kv_blocks[entry] != kv_block) return false;
  block.kind = static_cast<BlockKind>(list.kinds[entry]);
  block.entry = entry;
  return true;
}

// Return whether some query of a tile visits this key. Products read the rows of other keys as 0, since their P is 0,
// and 0 times NaN would be NaN.
CUFLASH_DEVICE bool is_visited_key(const Params& params, const BatchHead& batch_head, Range queries, Range keys,
                                   int key) {
  KvBlock block;
  if (key >= keys.last || !find_block(params, batch_head, queries, keys, block)) return false;
  if (block.kind == BlockKind::kFull) return true;
  if (block.kind == BlockKind::kInterval)  // neither bound ever decreases from one query to the next
    return interval(params, batch_head, queries.first).lo <= key &&
        key < interval(params, batch_head, queries.last - 1).hi;
  for (int query = queries.first; query < queries.last; ++query)
    if (block.is_allowed(params, batch_head, query, key)) return true;
  return false;
}

// Return whether this query visits some key of a tile.
CUFLASH_DEVICE bool is_visiting_query(const Params& params, const BatchHead& batch_head, Range queries, Range keys,
                                      int query) {
  KvBlock block;
  if (query >= queries.last || !find_block(params, batch_head, queries, keys, block)) return false;
  if (block.kind == BlockKind::kFull) return true;
  if (block.kind == BlockKind::kInterval) {
    const Interval visited = interval(params, batch_head, query);
    return max(visited.lo, keys.first) < min(visited.hi, keys.last);
  }
  for (int key = keys.first; key < keys.last; ++key)
    if (block.is_allowed(params, batch_head, query, key)) return true;
  return false;
}

// Return the number of tiles of `width` columns in a matrix.
CUFLASH_DEVICE int num_column_tiles(int num_columns, int width) { return (num_columns + width - 1) / width; }

// Return the tile of `width` columns with index `number`.
CUFLASH_DEVICE Range column_tile(int num_columns, int width, int number) {
  return {number * width, min(number * width + width, num_columns)};
}

// Store a gradient as `store_gradient` does, for the columns from `first_column` on.
template <class Element, class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE void store_gradient_columns(const Matrices& to, const WorkTile& work, int head, int num_rows,
                                           int num_columns, int first_column,
                                           const tile::RegisterTile<T, Rows, Columns, Run>& gradient) {
  const auto store_as = [&](auto all) {
    tile::store(all.rows(work.first, work.last).columns(first_column, num_columns), gradient);
  };
  if (sizeof(Element) == sizeof(T) || to.is_accumulator) {
    store_as(matrix<T>(to, work.batch_head, head, num_rows, num_columns));
  } else {
    store_as(matrix<Element>(to, work.batch_head, head, num_rows, num_columns));
  }
}

}  // namespace cuflash::attention
