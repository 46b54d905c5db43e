#pragma once
#include <attention/params.cuh>
#include <tile/copy.cuh>
#include <tile/count.cuh>

// Which tile of which matrix a block works on. Only here do kernels ask for their block's number.
namespace cuflash::attention {

// A batch entry and a head: the matrices of one softmax.
struct Place {
  int batch[kBatchAxes];
  int entry;  // the batch entry as masks count it
  int head;   // of the queries
};

// Rows first <= x < last of the place's matrices.
struct WorkTile {
  Place place;
  int first, last;

  CUFLASH_DEVICE bool is_empty() const { return first >= last; }
};

// Whether the work is listed: known to the kernel, or asked when it runs.
template <bool IsListed>
struct ListedAs {
  static CUFLASH_DEVICE bool in(const Work&) { return IsListed; }
};
struct ListedAtRunTime {
  static CUFLASH_DEVICE bool in(const Work& work) { return work.row_pointers != nullptr; }
};

// Which matrix of a list a place shares.
CUFLASH_DEVICE int64_t list_matrix(const Work& work, const Place& place) {
  return place.entry * work.list_batch_stride + place.head * work.list_head_stride;
}

// How often a number contains another, and what is left; neither is negative. Mostly the other one is a power of two, and a
// division takes a hundred cycles in which a block has nothing else to do.
struct Divided {
  int quotient, rest;
};
CUFLASH_DEVICE Divided divided(int number, int by) {
  by = ptx::opaque(by);  // else what follows from it is kept from tile to tile, and registers are few
  if ((by & (by - 1)) == 0) return {number >> (31 - __clz(by)), number & (by - 1)};
  const int quotient = static_cast<unsigned>(number) / static_cast<unsigned>(by);
  return {quotient, number - quotient * by};
}

// The queries or the keys, as tiles cut them. A place is a batch entry and as many query heads as share the rows.
struct Side {
  int length, heads_in_place;
  int block;             // of the list
  const int32_t* order;  // of the list; null without one
  bool is_last_longest;  // under a causal mask, without a list
  int places_in_turn;
};

// How a side is cut. Tiles stay within blocks: the last block, and the last tile of a block, may be short.
struct Cut {
  int block, tiles_in_block, num_blocks, num_tiles, num_heads, num_places;

  CUFLASH_DEVICE Cut(const Shape& shape, const Side& side, int height) {
    block = side.order != nullptr ? side.block : height;
    tiles_in_block = (block + height - 1) / height;
    num_blocks = side.order != nullptr ? divided(side.length + block - 1, block).quotient : (side.length + height - 1) / height;
    num_tiles = num_blocks * tiles_in_block;
    num_heads = shape.num_heads / side.heads_in_place;
    num_places = num_heads;
    for (int axis = 0; axis < kBatchAxes; ++axis) num_places *= shape.batch[axis];
  }
};

// A place, and which of its tiles, in the order in which they are taken.
struct Turns {
  int place, turn;
};

// What starts last decides how long others idle. So places take turns, each with its longest tiles first; as many at a
// time as the plan says.
CUFLASH_DEVICE Turns turns_at(const Side& side, const Cut& cut, int number) {
  const int in_turn = min(side.places_in_turn, cut.num_places);
  const Divided groups = divided(number, in_turn * cut.num_tiles);
  const int first_place = groups.quotient * in_turn;
  const Divided turns = divided(groups.rest, min(in_turn, cut.num_places - first_place));
  return {first_place + turns.rest, turns.quotient};
}

CUFLASH_DEVICE WorkTile work_tile(const Params& params, const Side& side, const Cut& cut, int height, const Turns& turns) {
  const Shape& shape = params.shape;
  const Divided entries = divided(turns.place, cut.num_heads);
  const Divided turn = side.order != nullptr ? divided(turns.turn, cut.tiles_in_block) : Divided{turns.turn, 0};
  int place = entries.quotient;
  WorkTile work;
  work.place.head = entries.rest * side.heads_in_place;
  work.place.entry = shape.first_batch + place;
  for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
    const int extent = shape.batch[axis];
    work.place.batch[axis] = place < extent ? place : place % extent;  // a division is long, and mostly there is one axis
    place = place < extent ? 0 : place / extent;
  }
  const int rank = turn.quotient;
  int start = cut.block * (side.is_last_longest ? cut.num_blocks - 1 - rank : rank);
  if (side.order != nullptr) start = cut.block * side.order[list_matrix(params.work, work.place) * cut.num_blocks + rank];
  work.first = start + turn.rest * height;
  work.last = min(min(work.first + height, start + cut.block), side.length);
  return work;
}
CUFLASH_DEVICE WorkTile work_tile(const Params& params, const Side& side, int height, int number) {
  const Cut cut(params.shape, side, height);
  return work_tile(params, side, cut, height, turns_at(side, cut, number));
}

// The number of a batch entry and head of the queries, in this launch.
CUFLASH_DEVICE int place_number(const Shape& shape, const Place& place) {
  return (place.entry - shape.first_batch) * shape.num_heads + place.head;
}

// Which part of its tile's work a block does, where `num_parts` of them share it.
CUFLASH_DEVICE int work_part(int num_parts) { return divided(blockIdx.x, num_parts).rest; }

// The queries of one head.
template <class Listed>
CUFLASH_DEVICE Side queries_of(const Params& params) {
  const Work& work = params.work;
  const int32_t* const order = Listed::in(work) ? work.row_order : nullptr;
  return {params.shape.seqlen_q, 1, work.block_q, order, true, params.shape.places_in_turn};
}

template <class Listed = ListedAtRunTime>
CUFLASH_DEVICE WorkTile query_tile(const Params& params, int height, int num_parts = 1) {
  return work_tile(params, queries_of<Listed>(params), height, divided(blockIdx.x, num_parts).quotient);
}

// The last first. Kernels that run before and after one that takes tiles in their order find, or leave, in the level-2 cache
// what it starts with, or ended with.
template <class Listed>
CUFLASH_DEVICE WorkTile query_tile_from_last(const Params& params, int height) {
  Side queries = queries_of<Listed>(params);
  if (queries.order == nullptr && params.shape.finished_places > 0)
    queries.places_in_turn = 1;  // so that the last tiles are of the last places
  const Cut cut(params.shape, queries, height);
  const int number = cut.num_places * cut.num_tiles - 1 - blockIdx.x;
  return work_tile(params, queries, cut, height, turns_at(queries, cut, number));
}

// For blocks that work on several tiles, one after the other: how many there are, and the tile of a number. Without a list
// tiles are cut from the end: a short last one would, under a causal mask, walk all keys for few queries.
template <class Listed>
CUFLASH_DEVICE int num_query_tiles(const Params& params, int height) {
  const Cut cut(params.shape, queries_of<Listed>(params), height);
  return cut.num_places * cut.num_tiles;
}
template <class Listed>
CUFLASH_DEVICE WorkTile query_tile_at(const Params& params, int height, int number) {
  const Side queries = queries_of<Listed>(params);
  WorkTile work = work_tile(params, queries, height, number);
  if (queries.order == nullptr) {
    const int first = work.first - (height - queries.length % height) % height;
    work.first = max(first, 0);
    work.last = first + height;
  }
  return work;
}

// The queries of all heads that share a key/value head, head after head; `place.head` is the first of them.
CUFLASH_DEVICE WorkTile packed_query_tile(const Params& params, int height, int num_parts) {
  const Shape& shape = params.shape;
  const Side queries{shape.seqlen_q * shape.group_size, shape.group_size, 0, nullptr, true, 1};
  return work_tile(params, queries, height, divided(blockIdx.x, num_parts).quotient);
}

// The place of a block that works on a whole head of the queries.
CUFLASH_DEVICE Place head_place(const Params& params) {
  const Side one{1, 1, 0, nullptr, true, 1};
  return work_tile(params, one, 1, blockIdx.x).place;
}

// Which tile of its matrix starts with a query.
template <class Listed = ListedAtRunTime>
CUFLASH_DEVICE int query_tile_number(const Params& params, int first, int height) {
  const int block = params.work.block_q;
  if (!Listed::in(params.work) || block % height == 0) return first / height;
  return first / block * ((block + height - 1) / height) + first % block / height;
}

// Where the tile of queries ends that starts with one.
template <class Listed = ListedAtRunTime>
CUFLASH_DEVICE int query_tile_end(const Params& params, int first, int height) {
  const int last = min(first + height, params.shape.seqlen_q), block = params.work.block_q;
  return Listed::in(params.work) ? min(last, (first / block + 1) * block) : last;
}

// The keys of the query heads that share them; `place.head` is the first of these, whose list says the order.
template <class Listed>
CUFLASH_DEVICE Side keys_of(const Params& params) {
  const Shape& shape = params.shape;
  const Work& work = params.work;
  const int32_t* const order = Listed::in(work) ? work.column_order : nullptr;
  return {shape.seqlen_kv, shape.group_size, work.block_kv, order, false, shape.key_places_in_turn};
}

template <class Listed = ListedAtRunTime>
CUFLASH_DEVICE WorkTile key_tile(const Params& params, int height, int num_parts = 1) {
  return work_tile(params, keys_of<Listed>(params), height, divided(blockIdx.x, num_parts).quotient);
}
template <class Listed>
CUFLASH_DEVICE WorkTile key_tile_at(const Params& params, int height, int number) {
  return work_tile(params, keys_of<Listed>(params), height, number);
}

// Where the blocks of gradients finish dQ of the first places (attention/dq_turns.cuh), a group of places has its last keys
// walked some rounds ahead of others, those backwards, and its first keys some rounds behind, between tiles of other groups.
// So a tile waits for none that is taken later, and finds done what it waits for.
struct FinishingTurns {
  int places, num_tiles, num_groups, ahead, behind;

  CUFLASH_DEVICE Turns at(int number) const {
    const int places = ptx::opaque(this->places);  // else what follows from it is kept from tile to tile, and registers are few
    const int inner = places * (num_tiles - 2), whole = places * num_tiles;
    int round = 0, from = 0;  // of the round's places: last keys of all, others, first keys
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
    if (!is_within(ahead, places) && !is_within(behind, whole - places) &&
        !is_within(num_groups - ahead - behind, whole)) {
      from = places;
      if (!is_within(ahead, whole - places)) {
        from = places + inner;
        is_within(behind, places);
      }
    }
    const int turn = num_tiles - 1 - number / places;
    const int group = round - (turn == num_tiles - 1 ? 0 : turn == 0 ? ahead + behind : ahead);
    return {group * places + number % places, turn};
  }
};
template <class Listed>
CUFLASH_DEVICE WorkTile finishing_key_tile_at(const Params& params, int height, int number) {
  const Side keys = keys_of<Listed>(params);
  const Cut cut(params.shape, keys, height);
  const int places = params.shape.finished_places / params.shape.group_size;
  const bool finishes = number < places * cut.num_tiles;
  return work_tile(params, keys, cut, height,
                   finishes ? FinishingTurns{keys.places_in_turn, cut.num_tiles, places / keys.places_in_turn,
                                             params.shape.rounds_ahead, params.shape.rounds_behind}.at(number)
                            : turns_at(keys, cut, number));
}

// For blocks that go on to further tiles as they end: how many there are, a block's first, and the next that nobody has.
// The last to ask leaves the count as it found it, for a further launch. By one thread.
template <class Listed>
CUFLASH_DEVICE int num_key_tiles(const Params& params, int height) {
  const Cut cut(params.shape, keys_of<Listed>(params), height);
  return cut.num_places * cut.num_tiles;
}
CUFLASH_DEVICE int first_number() { return blockIdx.x; }
CUFLASH_DEVICE int next_number(const Params& params, int num_tiles) {
  int* const next = static_cast<int*>(params.next_tile.data);
  const int asked = tile::take_number(next);
  if (asked == num_tiles - 1) *next = 0;
  return gridDim.x + asked;
}
// The same where a block asks for its first tile too, so that tiles are taken in their order, whichever blocks start.
CUFLASH_DEVICE int number_in_order(const Params& params, int num_tiles) {
  int* const next = static_cast<int*>(params.next_tile.data);
  const int asked = tile::take_number(next);
  if (asked + 1 - num_tiles == static_cast<int>(gridDim.x)) *next = 0;
  return asked;
}
// In a kernel that runs before.
CUFLASH_DEVICE void reset_numbers(const Params& params) {
  int* const next = static_cast<int*>(params.next_tile.data);
  if (next != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *next = 0;
}

// The matrix of a batch entry and head.
template <class T>
CUFLASH_DEVICE tile::Matrix<T> matrix(const Matrices& matrices, const Place& place, int head, int num_rows,
                                      int num_columns) {
  int64_t start = head * matrices.head_stride;
  for (int axis = 0; axis < kBatchAxes; ++axis) start += place.batch[axis] * matrices.batch_strides[axis];
  return {static_cast<T*>(matrices.data) + start, matrices.row_stride, matrices.column_stride, num_rows, num_columns};
}

}  // namespace cuflash::attention
