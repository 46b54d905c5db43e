#pragma once
#include <attention/chosen_lists.cuh>
#include <attention/mask_softmax_mma.cuh>
#include <attention/score.cuh>
#include <tile/copy_async.cuh>

// Queries that each choose their own key blocks. A tile has the rows of neighboring queries, query after query, and
// each query has a row for every head that shares its list. The tile visits the union of its queries' lists. A word for
// each block of the union has a bit for each query of the tile, set if the query chose the block.
namespace cuflash::attention {

// How BlockIterator walks over a union. The visit range of a tile determines which blocks need no mask.
struct OverUnions : OverKvBlocks {
  static CUFLASH_DEVICE BlockKind kind(const WorkList&, int) { return BlockKind::kInterval; }
};

// Return the index of the list head to which a batch entry and head belong.
CUFLASH_DEVICE int64_t list_head(const ChosenLists& chosen, const BatchHead& batch_head) {
  return batch_head.batch_index * chosen.batch_stride +
         divmod(batch_head.head, chosen.heads_per_list).quotient * chosen.head_stride;
}

// Return the axis of queries, cut into tiles of neighboring queries with the heads that share their lists.
CUFLASH_DEVICE TileAxis axis_of_neighbours(const Params& params, const ChosenLists& chosen) {
  return {params.shape.seqlen_q, chosen.heads_per_tile, 0, nullptr, true, params.shape.heads_per_l2_group};
}

// Return the tile that a thread block works on: queries of one head or, in the second function, neighboring queries of
// the heads from `batch_head.head` on.
template <class Listed>
CUFLASH_DEVICE WorkTile tile_of_block(const Params& params, NoChosenLists, int height, int num_parts = 1) {
  return query_tile<Listed>(params, height, num_parts);
}
template <class Listed>
CUFLASH_DEVICE WorkTile tile_of_block(const Params& params, const ChosenLists& chosen, int, int = 1) {
  return work_tile(params, axis_of_neighbours(params, chosen), chosen.queries_per_tile, thread_block());
}

// Return the number of such tiles, for persistent blocks. The last two functions return the tile with index `number`.
template <class Listed>
CUFLASH_DEVICE int num_tiles_of_queries(const Params& params, NoChosenLists, int height) {
  return num_query_tiles<Listed>(params, height);
}
template <class>
CUFLASH_DEVICE int num_tiles_of_queries(const Params& params, const ChosenLists& chosen, int) {
  const TileScheduler scheduler(params.shape, axis_of_neighbours(params, chosen), chosen.queries_per_tile);
  return scheduler.num_batch_heads * scheduler.num_tiles;
}
template <class Listed>
CUFLASH_DEVICE WorkTile tile_of_queries_at(const Params& params, NoChosenLists, int height, int number) {
  return query_tile_at<Listed>(params, height, number);
}
template <class>
CUFLASH_DEVICE WorkTile tile_of_queries_at(const Params& params, const ChosenLists& chosen, int, int number) {
  return work_tile(params, axis_of_neighbours(params, chosen), chosen.queries_per_tile, number);
}

// Return the keys that the queries of a tile may visit, and the entries of the union of their lists.
CUFLASH_DEVICE VisitRange visit_range_of_tile(const Params& params, NoChosenLists, const WorkTile& work) {
  return visit_range_of_queries(params, work);
}
CUFLASH_DEVICE VisitRange visit_range_of_tile(const Params& params, const ChosenLists& chosen, const WorkTile& work) {
  VisitRange visit_range = visit_range_of_queries(params, work);
  const int tile = divmod(work.first, chosen.queries_per_tile).quotient;
  const int32_t* const range = chosen.ranges + 2 * (list_head(chosen, work.batch_head) * chosen.num_tiles + tile);
  visit_range.first_entry = range[0];
  visit_range.last_entry = range[1];
  return visit_range;
}

// Return the rows of a tile in an array of queries.
template <class T>
CUFLASH_DEVICE tile::Matrix<T> rows_of_tile(NoChosenLists, const Matrices& matrices, const WorkTile& work,
                                            int num_columns) {
  return matrix<T>(matrices, work.batch_head, work.batch_head.head, 0, num_columns).rows(work.first, work.last);
}
template <class T>
CUFLASH_DEVICE tile::StackedRows<T> rows_of_tile(const ChosenLists& chosen, const Matrices& matrices,
                                                 const WorkTile& work, int num_columns) {
  const auto first = matrix<T>(matrices, work.batch_head, work.batch_head.head, 0, num_columns);
  return {{first.data + work.first * matrices.row_stride, matrices.head_stride, matrices.column_stride,
           chosen.heads_per_tile, num_columns},
          matrices.row_stride,
          (work.last - work.first) * chosen.heads_per_tile};
}

// Return the head and the query of a row of a tile of neighboring queries. Rows past the last query get the index of
// the last query.
CUFLASH_DEVICE HeadAndQuery head_and_query_of_neighbours(const ChosenLists& chosen, const WorkTile& work, int row) {
  const DivMod number = divmod(row, chosen.heads_per_tile);
  return {work.batch_head.head + number.remainder, min(work.first + number.quotient, work.last - 1)};
}

// Return a word in which the bits of those queries are set to which some rows of a tile belong.
CUFLASH_DEVICE uint64_t queries_of_rows(const ChosenLists& chosen, int first_row, int num_rows) {
  const int first = divmod(first_row, chosen.heads_per_tile).quotient;
  const int last = divmod(first_row + num_rows - 1, chosen.heads_per_tile).quotient;
  return ~0ull >> (63 - last) & ~0ull << first;
}

// Return the keys that a row of a tile attends in a step. In `word`, the bits of the queries that chose the step's
// block are set.
CUFLASH_DEVICE RowMask row_mask_of_neighbour(const Params& params, const ChosenLists& chosen, const WorkTile& work,
                                             const KvBlock& block, uint64_t word, int row) {
  const int number = divmod(row, chosen.heads_per_tile).quotient;
  if ((word >> number & 1) == 0) return {0, 0, nullptr, 0};
  return block.row_mask(params, work.batch_head, work.first + number);
}

// The queries that chose the block of a step, in kernels in which all queries of a tile visit the same blocks: all of
// them.
struct EveryQuery {
  CUFLASH_DEVICE EveryQuery(NoChosenLists, const WorkTile&) {}
  CUFLASH_DEVICE void read(const KvBlock&) {}
  static constexpr CUFLASH_DEVICE bool has_any() { return true; }
  static constexpr CUFLASH_DEVICE bool has_all() { return true; }
};

// The queries of a tile that chose the block of a step, and whether any or all of the queries in a warp's rows did.
// Tile is the type of the scores.
template <class Tile>
class Members {
 public:
  CUFLASH_DEVICE Members(const ChosenLists& chosen, const WorkTile& work)
      : chosen_(chosen),
        num_queries_(work.last - work.first),
        of_warp_(queries_of_rows(chosen, Tile::warp_row(), 16 * Tile::kRowTiles)) {}

  CUFLASH_DEVICE void read(const KvBlock& block) { word_ = chosen_.word(block.entry); }
  CUFLASH_DEVICE bool has_any() const { return (word_ & of_warp_) != 0; }
  CUFLASH_DEVICE bool has_all() const { return word_ == ~0ull >> (64 - num_queries_); }

  // Return the keys that a row of the tile attends in the step.
  CUFLASH_DEVICE RowMask row_mask(const Params& params, const WorkTile& work, const KvBlock& block, int row) const {
    return row_mask_of_neighbour(params, chosen_, work, block, word_, row);
  }

 private:
  const ChosenLists& chosen_;
  int num_queries_;
  uint64_t of_warp_, word_ = 0;
};

template <class Config, class Tile>
using MembersOf = tile::Conditional<Config::kPacksQueries, Members<Tile>, EveryQuery>;

// Set the masked scores of a step, and the scores of queries that did not choose its block, to a value.
template <bool HasBits, class Tile>
CUFLASH_DEVICE void mask_step(Tile& s, const Params& params, const WorkTile& work, const KvBlock& block, float value,
                              EveryQuery) {
  mask_scores<HasBits>(s, params, work, block, value);
}
template <bool, class Tile>
CUFLASH_DEVICE void mask_step(Tile& s, const Params& params, const WorkTile& work, const KvBlock& block, float value,
                              const Members<Tile>& members) {
  mask_rows<false>(s, block, value, [&](int row) { return members.row_mask(params, work, block, row); });
}

// A tile of keys and its place in the lists of queries: its block, and the part of the block's queries that a thread
// block processes.
struct Column {
  int64_t number;  // index of the block's pointers
  int tile;  // index of the tile within the block
  int part;

  CUFLASH_DEVICE Column(const Params& params, const ChosenLists& chosen, const WorkTile& work, int part, int height)
      : part(part) {
    const DivMod block = divmod(work.first, params.work.block_kv);
    number = list_head(chosen, work.batch_head) * (chosen.num_blocks + 1) + block.quotient;
    tile = block.remainder / height;
  }
  // Construct the column of this thread block, whose index determines the part.
  CUFLASH_DEVICE Column(const Params& params, const ChosenLists& chosen, const WorkTile& work, int height)
      : Column(params, chosen, work, split_index(chosen.num_parts), height) {}

  // Return the index of the part's first query in the list of queries. The second function returns the index past its
  // last one.
  CUFLASH_DEVICE int first(const ChosenLists& chosen) const {
    return chosen.column_pointers[number] + part * chosen.queries_per_part;
  }
  CUFLASH_DEVICE int last(const ChosenLists& chosen) const {
    return min(first(chosen) + chosen.queries_per_part, chosen.column_pointers[number + 1]);
  }
};

// Return the largest number of thread blocks that share a tile of keys. The last two functions return whether this
// thread block has a part of the tile.
constexpr CUFLASH_DEVICE int parts_of_keys(NoChosenLists) { return 1; }
CUFLASH_DEVICE int parts_of_keys(const ChosenLists& chosen) { return chosen.num_parts; }
CUFLASH_DEVICE bool has_part_of_keys(const Params&, NoChosenLists, const WorkTile&) { return true; }
CUFLASH_DEVICE bool has_part_of_keys(const Params& params, const ChosenLists& chosen, const WorkTile& work) {
  const Column column(params, chosen, work, 1);
  return column.part == 0 || column.first(chosen) < column.last(chosen);
}

// Return the queries that visit a tile of keys: queries of one head or, if queries choose blocks, indices into the list
// of queries.
CUFLASH_DEVICE VisitRange visit_range_of_keys(const Params& params, const ChosenLists& chosen, const WorkTile& work) {
  const VisitRange queries = visit_range_of_keys(params, work);
  const Column column(params, chosen, work, 1);
  const auto place_of = [&](int query) {
    int first = column.first(chosen), last = column.last(chosen);
    while (first < last) {
      const int middle = (first + last) / 2;
      if (chosen.queries[middle] < query) first = middle + 1;
      else last = middle;
    }
    return first;
  };
  return {place_of(queries.start), place_of(queries.stop), place_of(queries.full_start), place_of(queries.full_stop)};
}
CUFLASH_DEVICE VisitRange visit_range_of_keys(const Params& params, NoChosenLists, const WorkTile& work) {
  return visit_range_of_keys(params, work);
}

// An iterator over the queries that chose a key block, which advances by the number of queries in a tile. The `start`
// and `stop` of a step are indices into the list of queries.
class ColumnIterator {
 public:
  CUFLASH_DEVICE ColumnIterator(const ChosenLists& chosen, const VisitRange& visit_range)
      : visit_range_(visit_range), queries_per_tile_(chosen.queries_per_tile), place_(visit_range.start) {}

  CUFLASH_DEVICE bool next(KvBlock& block) {
    if (place_ >= visit_range_.stop) return false;
    block.start = place_;
    place_ = block.stop = min(place_ + queries_per_tile_, visit_range_.stop);
    const bool is_full = block.start >= visit_range_.full_start && block.stop <= visit_range_.full_stop;
    block.kind = is_full ? BlockKind::kFull : BlockKind::kInterval;
    return true;
  }

 private:
  const VisitRange& visit_range_;
  int queries_per_tile_, place_;
};

// Return the iterator over the queries that visit a tile of keys.
template <int Width, class Listed>
CUFLASH_DEVICE auto queries_of_keys(const Params& params, NoChosenLists, const VisitRange& visit_range) {
  return BlockIterator<Width, OverQBlocks, Listed>(params, visit_range);
}
template <int, class>
CUFLASH_DEVICE auto queries_of_keys(const Params&, const ChosenLists& chosen, const VisitRange& visit_range) {
  return ColumnIterator(chosen, visit_range);
}

// Return the number of heads per query in a tile. The last function returns the number of rows in a step of queries.
CUFLASH_DEVICE int heads_per_tile(NoChosenLists) { return 1; }
CUFLASH_DEVICE int heads_per_tile(const ChosenLists& chosen) { return chosen.heads_per_tile; }
template <class Chosen>
CUFLASH_DEVICE int rows_of_step(const Chosen& chosen, const KvBlock& block) {
  return (block.stop - block.start) * heads_per_tile(chosen);
}

// Return the rows of a step in an array of queries. `data` points to the tile's first head.
template <class T>
CUFLASH_DEVICE tile::GatheredRows<T> gathered_rows(const ChosenLists& chosen, const KvBlock& block, T* data,
                                                   const Matrices& matrices, int num_columns) {
  const tile::Matrix<T> heads{data, matrices.head_stride, matrices.column_stride, chosen.heads_per_tile, num_columns};
  return {{heads, matrices.row_stride, rows_of_step(chosen, block)}, chosen.queries + block.start};
}

// Set the masked scores of a step of a tile of keys to a value.
template <bool HasBits, class Tile>
CUFLASH_DEVICE void mask_step_of_keys(Tile& s, const Params& params, NoChosenLists, const WorkTile& work,
                                      const KvBlock& block, float value) {
  const WorkTile queries{work.batch_head, block.start, block.stop};
  mask_scores<HasBits>(s, params, queries, {work.first, work.last, block.kind, block.entry}, value);
}
template <bool, class Tile>
CUFLASH_DEVICE void mask_step_of_keys(Tile& s, const Params& params, const ChosenLists& chosen, const WorkTile& work,
                                      const KvBlock& block, float value) {
  const KvBlock keys{work.first, work.last, block.kind, -1};
  mask_rows<false>(s, keys, value, [&](int row) -> RowMask {
    const int place = block.start + divmod(row, chosen.heads_per_tile).quotient;
    if (place >= block.stop) return {0, 0, nullptr, 0};
    return keys.row_mask(params, work.batch_head, chosen.queries[place]);
  });
}

}  // namespace cuflash::attention
