#pragma once
#include <attention/params.cuh>
#include <tile/copy.cuh>
#include <tile/counter.cuh>

// The tile scheduler: maps a thread block to its work tiles. Only this file reads the index of the thread block.
namespace cuflash::attention {

// A batch entry and a head: the matrices of one softmax.
struct BatchHead {
  int batch[kBatchAxes];
  int batch_index;  // batch entry, in the numbering of masks
  int head;  // query head
};

// Rows first <= x < last of the matrices of a batch entry and head.
struct WorkTile {
  BatchHead batch_head;
  int first, last;

  CUFLASH_DEVICE bool is_empty() const { return first >= last; }
};

// Two flags: whether there is a list, and whether tiles have an order (with a list they always do). This type holds the
// flags as compile-time constants, the next type as run-time values.
template <bool IsListed, bool IsOrdered = IsListed>
struct StaticListed {
  static CUFLASH_DEVICE bool has_list(const WorkList&) { return IsListed; }
  static CUFLASH_DEVICE bool has_order(const WorkList&) { return IsListed || IsOrdered; }
};
struct DynamicListed {
  static CUFLASH_DEVICE bool has_list(const WorkList& list) { return list.row_pointers != nullptr; }
  static CUFLASH_DEVICE bool has_order(const WorkList& list) { return has_list(list); }
};

// Return the index of the list that a batch entry and head use.
CUFLASH_DEVICE int64_t list_index(const WorkList& list, const BatchHead& batch_head) {
  return batch_head.batch_index * list.list_batch_stride + batch_head.head * list.list_head_stride;
}

// Quotient and remainder of two nonnegative numbers. The divisor is usually a power of two: then a shift replaces the
// division, which takes about a hundred cycles. Shifts, and reading a list before the first copies, saved 2 to 5 % of
// sm80's dense forward passes of 4096 tokens (step 6 of sm80_steps.log at commit b648872e).
struct DivMod {
  int quotient, remainder;
};
CUFLASH_DEVICE DivMod divmod(int number, int by) {
  // hidden from the compiler, so that dependent values are computed again for each tile and take no registers
  by = ptx::opaque(by);
  if ((by & (by - 1)) == 0) return {number >> (31 - __clz(by)), number & (by - 1)};
  const int quotient = static_cast<unsigned>(number) / static_cast<unsigned>(by);
  return {quotient, number - quotient * by};
}

// The axis of queries, or of keys, that is cut into tiles. A row group is a batch entry with the query heads that share
// the rows.
struct TileAxis {
  int length, heads_per_row_group;
  int block;  // block size of the order
  const int32_t* order;  // order of the blocks, or null
  bool is_last_longest;  // true if the last rows visit the most blocks, as under a causal mask, and there is no list
  int heads_per_l2_group;
};

// The cut of an axis into tiles. Tiles stay within blocks: the last block, and the last tile of a block, may be short.
struct TileScheduler {
  int block, tiles_in_block, num_blocks, num_tiles, num_heads, num_batch_heads;

  CUFLASH_DEVICE TileScheduler(const Shape& shape, const TileAxis& axis, int height) {
    block = axis.order != nullptr ? axis.block : height;
    tiles_in_block = (block + height - 1) / height;
    num_blocks = axis.order != nullptr ? divmod(axis.length + block - 1, block).quotient
                                       : (axis.length + height - 1) / height;
    num_tiles = num_blocks * tiles_in_block;
    num_heads = shape.num_heads / axis.heads_per_row_group;
    num_batch_heads = num_heads;
    for (int dim = 0; dim < kBatchAxes; ++dim) num_batch_heads *= shape.batch[dim];
  }
};

// A batch entry with a head, and the rank of one of its tiles, in the order in which blocks take them.
struct TileOrder {
  int batch_head_number, rank;
};

// Return the tile at a position of the order. The tiles that start last determine how long other blocks idle. Therefore
// heads alternate, each with its longest tiles first. The plan sets the number of heads that alternate at a time,
// heads_per_l2_group.
CUFLASH_DEVICE TileOrder tile_order_at(const TileAxis& axis, const TileScheduler& scheduler, int number) {
  const int heads_per_group = min(axis.heads_per_l2_group, scheduler.num_batch_heads);
  const DivMod groups = divmod(number, heads_per_group * scheduler.num_tiles);
  const int first_batch_head = groups.quotient * heads_per_group;
  const DivMod head_and_tile = divmod(groups.remainder,
                                      min(heads_per_group, scheduler.num_batch_heads - first_batch_head));
  return {first_batch_head + head_and_tile.remainder, head_and_tile.quotient};
}

// Return the rows of a tile. The second function takes the tile's index instead of its place in the order.
CUFLASH_DEVICE WorkTile work_tile(const Params& params, const TileAxis& axis, const TileScheduler& scheduler,
                                  int height, const TileOrder& order) {
  const Shape& shape = params.shape;
  const DivMod batch_and_head = divmod(order.batch_head_number, scheduler.num_heads);
  const DivMod block_and_tile =
      axis.order != nullptr ? divmod(order.rank, scheduler.tiles_in_block) : DivMod{order.rank, 0};
  int batch_entry = batch_and_head.quotient;
  WorkTile work;
  work.batch_head.head = batch_and_head.remainder * axis.heads_per_row_group;
  work.batch_head.batch_index = shape.first_batch + batch_entry;
  for (int dim = kBatchAxes - 1; dim >= 0; --dim) {
    const int extent = shape.batch[dim];
    // avoids a slow division, since there is usually one batch axis
    work.batch_head.batch[dim] = batch_entry < extent ? batch_entry : batch_entry % extent;
    batch_entry = batch_entry < extent ? 0 : batch_entry / extent;
  }
  const int block_rank = block_and_tile.quotient;
  int start = scheduler.block * (axis.is_last_longest ? scheduler.num_blocks - 1 - block_rank : block_rank);
  if (axis.order != nullptr)
    start = scheduler.block *
        axis.order[list_index(params.work, work.batch_head) * scheduler.num_blocks + block_rank];
  work.first = start + block_and_tile.remainder * height;
  work.last = min(min(work.first + height, start + scheduler.block), axis.length);
  return work;
}
CUFLASH_DEVICE WorkTile work_tile(const Params& params, const TileAxis& axis, int height, int number) {
  const TileScheduler scheduler(params.shape, axis, height);
  return work_tile(params, axis, scheduler, height, tile_order_at(axis, scheduler, number));
}

// Return the index of a batch entry with a query head in this launch.
CUFLASH_DEVICE int batch_head_number(const Shape& shape, const BatchHead& batch_head) {
  return (batch_head.batch_index - shape.first_batch) * shape.num_heads + batch_head.head;
}

// Return which part of its tile a block computes, if `num_parts` blocks share the tile.
CUFLASH_DEVICE int split_index(int num_parts) { return divmod(blockIdx.x, num_parts).remainder; }

// Return the axis of the queries of one head.
template <class Listed>
CUFLASH_DEVICE TileAxis query_axis(const Params& params) {
  const WorkList& list = params.work;
  const int32_t* const order = Listed::has_order(list) ? list.row_order : nullptr;
  return {params.shape.seqlen_q, 1, list.block_q, order, true, params.shape.heads_per_l2_group};
}

// Return the tile of queries that a thread block works on; `num_parts` blocks share a tile.
template <class Listed = DynamicListed>
CUFLASH_DEVICE WorkTile query_tile(const Params& params, int height, int num_parts = 1) {
  return work_tile(params, query_axis<Listed>(params), height, divmod(blockIdx.x, num_parts).quotient);
}

// Return the tile of a thread block in reverse order. A kernel that runs before or after another one thus leaves in the
// L2 cache the tiles with which the other one starts, or finds there those with which the other one ended.
template <class Listed>
CUFLASH_DEVICE WorkTile query_tile_reversed(const Params& params, int height) {
  TileAxis queries = query_axis<Listed>(params);
  if (queries.order == nullptr && params.shape.num_fused_dq_heads > 0)
    queries.heads_per_l2_group = 1;  // so that the last tiles belong to the last heads
  const TileScheduler scheduler(params.shape, queries, height);
  const int number = scheduler.num_batch_heads * scheduler.num_tiles - 1 - blockIdx.x;
  return work_tile(params, queries, scheduler, height, tile_order_at(queries, scheduler, number));
}

// Return the number of tiles of queries, for persistent blocks. The second function returns the tile with index
// `number`. Without a list, tiles are cut from the end of the queries: under a causal mask, a short last tile would
// visit all keys for few queries.
template <class Listed>
CUFLASH_DEVICE int num_query_tiles(const Params& params, int height) {
  const TileScheduler scheduler(params.shape, query_axis<Listed>(params), height);
  return scheduler.num_batch_heads * scheduler.num_tiles;
}
template <class Listed>
CUFLASH_DEVICE WorkTile query_tile_at(const Params& params, int height, int number) {
  const TileAxis queries = query_axis<Listed>(params);
  WorkTile work = work_tile(params, queries, height, number);
  if (queries.order == nullptr) {
    const int first = work.first - (height - queries.length % height) % height;
    work.first = max(first, 0);
    work.last = first + height;
  }
  return work;
}

// Return the axis of queries, cut after every `height` queries instead of at the blocks of a list.
CUFLASH_DEVICE TileAxis uncut_query_axis(const Params& params) {
  return {params.shape.seqlen_q, 1, 0, nullptr, true, params.shape.heads_per_l2_group};
}
// Return the tile of `height` queries that a thread block works on, independent of the blocks of a list.
CUFLASH_DEVICE WorkTile query_rows(const Params& params, int height) {
  return work_tile(params, uncut_query_axis(params), height, blockIdx.x);
}
// Return the number of tiles of `height` queries, for persistent blocks. The second function returns the tile with
// index `number`.
CUFLASH_DEVICE int num_query_rows(const Params& params, int height) {
  const TileScheduler scheduler(params.shape, uncut_query_axis(params), height);
  return scheduler.num_batch_heads * scheduler.num_tiles;
}
CUFLASH_DEVICE WorkTile query_rows_at(const Params& params, int height, int number) {
  return work_tile(params, uncut_query_axis(params), height, number);
}
// Return the index of the thread block.
CUFLASH_DEVICE int thread_block() { return blockIdx.x; }

// Return a tile of the queries of all heads that share a key/value head, one head after the other (pack_gqa);
// `batch_head.head` is the first of these heads.
CUFLASH_DEVICE WorkTile packed_query_tile(const Params& params, int height, int num_parts) {
  const Shape& shape = params.shape;
  const TileAxis queries{shape.seqlen_q * shape.group_size, shape.group_size, 0, nullptr, true, 1};
  return work_tile(params, queries, height, divmod(blockIdx.x, num_parts).quotient);
}

// Return the batch entry and head of a block that works on a whole head of the queries.
CUFLASH_DEVICE BatchHead own_batch_head(const Params& params) {
  const TileAxis one{1, 1, 0, nullptr, true, 1};
  return work_tile(params, one, 1, blockIdx.x).batch_head;
}

// Return the batch entry and head of a block that works on a whole key/value head; `head` is the first of the query
// heads that share it.
CUFLASH_DEVICE BatchHead own_kv_batch_head(const Params& params) {
  const TileAxis one{1, params.shape.group_size, 0, nullptr, true, 1};
  return work_tile(params, one, 1, blockIdx.x).batch_head;
}

// Return the index, within its matrix, of the query tile that starts at query `first`.
template <class Listed = DynamicListed>
CUFLASH_DEVICE int query_tile_number(const Params& params, int first, int height) {
  const int block = params.work.block_q;
  if (!Listed::has_list(params.work) || block % height == 0) return first / height;
  return first / block * ((block + height - 1) / height) + first % block / height;
}

// Return the end of the query tile that starts at query `first`.
template <class Listed = DynamicListed>
CUFLASH_DEVICE int query_tile_end(const Params& params, int first, int height) {
  const int last = min(first + height, params.shape.seqlen_q), block = params.work.block_q;
  return Listed::has_list(params.work) ? min(last, (first / block + 1) * block) : last;
}

// Return the axis of the keys of a key/value head. `batch_head.head` of its tiles is the first query head that shares
// it; the list of that query head has the order.
template <class Listed>
CUFLASH_DEVICE TileAxis key_axis(const Params& params) {
  const Shape& shape = params.shape;
  const WorkList& list = params.work;
  const int32_t* const order = Listed::has_order(list) ? list.column_order : nullptr;
  return {shape.seqlen_kv, shape.group_size, list.block_kv, order, false, shape.kv_heads_per_l2_group};
}

// Return the tile of keys that a block works on; `num_parts` blocks share a tile.
template <class Listed = DynamicListed>
CUFLASH_DEVICE WorkTile key_tile(const Params& params, int height, int num_parts = 1) {
  return work_tile(params, key_axis<Listed>(params), height, divmod(blockIdx.x, num_parts).quotient);
}
// Return the tile of keys with index `number`; with `last_first`, the last tile of a head has the lowest index.
template <class Listed>
CUFLASH_DEVICE WorkTile key_tile_at(const Params& params, int height, int number, bool last_first = false) {
  TileAxis keys = key_axis<Listed>(params);
  keys.is_last_longest = last_first;
  return work_tile(params, keys, height, number);
}

// The order of tiles in kernels that finish dQ of the first heads themselves (sm90/dq_semaphore.cuh). The last tiles of
// keys of a group of heads are taken `last_tile_lead` rounds before its other tiles, and its first tiles
// `first_tile_lag` rounds after them, between tiles of other groups. Thus no tile waits for one that is taken later,
// and most tiles wait for tiles that are already done.
struct FusedDqTileOrder {
  int batch_heads, num_tiles, num_groups, last_tile_lead, first_tile_lag;

  CUFLASH_DEVICE TileOrder at(int number) const {
    // hidden from the compiler, so that dependent values are computed again for each tile and take no registers
    const int batch_heads = ptx::opaque(this->batch_heads);
    const int inner = batch_heads * (num_tiles - 2), tiles_per_round = batch_heads * num_tiles;
    int round = 0, from = 0;  // first position in the round; a round has last tiles, then inner tiles, then first tiles
    const auto is_within = [&](int rounds, int width) {
      if (number < rounds * width) {
        round += number / width;
        number = from + number % width;
        return true;
      }
      round += rounds;
      number -= rounds * width;
      return false;
    };
    if (!is_within(last_tile_lead, batch_heads) && !is_within(first_tile_lag, tiles_per_round - batch_heads) &&
        !is_within(num_groups - last_tile_lead - first_tile_lag, tiles_per_round)) {
      from = batch_heads;
      if (!is_within(last_tile_lead, tiles_per_round - batch_heads)) {
        from = batch_heads + inner;
        is_within(first_tile_lag, batch_heads);
      }
    }
    const int rank = num_tiles - 1 - number / batch_heads;
    const int group =
        round - (rank == num_tiles - 1 ? 0 : rank == 0 ? last_tile_lead + first_tile_lag : last_tile_lead);
    return {group * batch_heads + number % batch_heads, rank};
  }
};
// Return the tile of keys with index `number`, in kernels that finish dQ of the first heads themselves.
template <class Listed>
CUFLASH_DEVICE WorkTile fused_dq_key_tile_at(const Params& params, int height, int number) {
  const TileAxis keys = key_axis<Listed>(params);
  const TileScheduler scheduler(params.shape, keys, height);
  const int batch_heads = params.shape.num_fused_dq_heads / params.shape.group_size;
  const bool is_fused = number < batch_heads * scheduler.num_tiles;
  return work_tile(params, keys, scheduler, height,
                   is_fused ? FusedDqTileOrder{keys.heads_per_l2_group, scheduler.num_tiles,
                                               batch_heads / keys.heads_per_l2_group,
                                               params.shape.last_tile_lead, params.shape.first_tile_lag}.at(number)
                            : tile_order_at(keys, scheduler, number));
}

// Return the number of tiles of keys, for persistent blocks. The next two functions return a block's first tile, and
// the next tile that no block has taken; the block that takes the last tile resets the counter for a later launch.
// Called by one thread.
template <class Listed>
CUFLASH_DEVICE int num_key_tiles(const Params& params, int height) {
  const TileScheduler scheduler(params.shape, key_axis<Listed>(params), height);
  return scheduler.num_batch_heads * scheduler.num_tiles;
}
CUFLASH_DEVICE int first_tile_number() { return blockIdx.x; }
CUFLASH_DEVICE int next_tile_number(const Params& params, int num_tiles) {
  int32_t* const next = params.tile_counter;
  const int fetched = tile::fetch_increment(next);
  if (fetched == num_tiles - 1) tile::reset(next);
  return gridDim.x + fetched;
}
// Return the next tile from the counter. Here, the counter also supplies a block's first tile, so that tiles are taken
// in order, whichever blocks start first.
CUFLASH_DEVICE int next_tile_number_in_order(const Params& params, int num_tiles) {
  int32_t* const next = params.tile_counter;
  const int fetched = tile::fetch_increment(next);
  if (fetched + 1 - num_tiles == static_cast<int>(gridDim.x)) tile::reset(next);
  return fetched;
}
// Reset the counter. Called by an earlier kernel.
CUFLASH_DEVICE void reset_tile_counter(const Params& params) {
  int32_t* const next = params.tile_counter;
  if (next != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *next = 0;
}

// Return the matrix of a batch entry and head.
template <class T>
CUFLASH_DEVICE tile::Matrix<T> matrix(const Matrices& matrices, const BatchHead& batch_head, int head, int num_rows,
                                      int num_columns) {
  int64_t start = head * matrices.head_stride;
  for (int dim = 0; dim < kBatchAxes; ++dim) start += batch_head.batch[dim] * matrices.batch_strides[dim];
  return {static_cast<T*>(matrices.data) + start, matrices.row_stride, matrices.column_stride, num_rows, num_columns};
}

}  // namespace cuflash::attention
