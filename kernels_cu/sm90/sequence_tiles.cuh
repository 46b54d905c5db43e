#pragma once
#include <attention/block_iterator.cuh>
#include <ptx/thread.cuh>

// Tiles of at most Height queries of packed sequences, whose steps have Width keys. Queries are divided into blocks of
// Height positions; the tiles of a block are those that start in it. A tile of a long sequence starts where the number
// of keys before its first query is a multiple of Height, so that its last step ends with its diagonal. It has queries
// of this sequence only: queries of the next sequence would have to visit all keys of this one. Whatever the row
// intervals are, each query is in exactly one tile.
namespace cuflash::sm90 {

// The row intervals of a batch entry and head. They are always arrays here, so that loads need no branches and overlap.
struct RowIntervals {
  const int32_t* lo;
  const int32_t* hi;

  CUFLASH_DEVICE RowIntervals(const attention::WorkList& list, const attention::BatchHead& batch_head) {
    const int64_t start =
        batch_head.batch_index * list.interval_batch_stride + batch_head.head * list.interval_head_stride;
    lo = list.lo + start;
    hi = list.hi + start;
  }
};

// Return the first query in first < x < last whose sequence differs from that of the previous query, or `last` if there
// is none; the range has at most Height queries. Where one sequence follows another, the first key that queries see
// advances by more than one; within a window it advances by one. Called by a warp.
template <int Height>
CUFLASH_DEVICE int next_sequence(const RowIntervals& rows, int first, int last) {
  bool starts[Height / 32];
#pragma unroll
  for (int i = 0; i < Height / 32; ++i) {  // unrolled, so that the loads overlap
    const int row = min(first + 1 + 32 * i + ptx::lane(), last - 1), before = max(row - 1, first);
    starts[i] = rows.lo[row] > rows.lo[before] + 1;
  }
  int found = last;
#pragma unroll
  for (int i = Height / 32 - 1; i >= 0; --i) {
    const uint32_t chunk = __ballot_sync(0xffffffffu, starts[i]);
    if (chunk != 0) found = first + 32 * i + __ffs(chunk);
  }
  return found;
}

// Return the first query of the tiles of the block of positions that starts at `position`. This is `position` or, under
// a diagonal, the next query for which the number of preceding keys of its sequence is a multiple of Height, but not
// after the start of the next sequence. If the sequence ends in this block and has fewer than Height keys before it, it
// is `position`, since such short sequences share tiles. Called by a warp.
template <int Height>
CUFLASH_DEVICE int start_of_tiles(const RowIntervals& rows, int length, int position) {
  if (position == 0 || position >= length) return min(position, length);
  const int next = next_sequence<Height>(rows, position, min(position + Height, length)), last = next - 1;
  const int first_lo = rows.lo[position], first_hi = rows.hi[position];
  const int last_lo = rows.lo[last], last_hi = rows.hi[last];
  // False if the tile is in a window
  const bool has_diagonal = first_lo == last_lo && last_hi - first_hi == last - position;
  const int keys_before = first_hi - first_lo - 1;
  if (!has_diagonal || (next < position + Height && keys_before < Height)) return position;
  return min(position + (Height - keys_before % Height) % Height, next);
}

// Return the queries of the tiles that start in a block of positions. Called by a warp.
template <int Height>
CUFLASH_DEVICE attention::WorkTile queries_of_block(const attention::Params& params, attention::WorkTile block) {
  const RowIntervals rows(params.work, block.batch_head);
  const int length = params.shape.seqlen_q, last = start_of_tiles<Height>(rows, length, block.first + Height);
  block.first = start_of_tiles<Height>(rows, length, block.first);
  block.last = last;
  return block;
}

// Remove the first tile from `queries`, which must not be empty, and return it. If the keys of its first sequence take
// more than two steps, the tile ends with that sequence; otherwise short sequences share the tile. Called by a warp.
template <int Height, int Width>
CUFLASH_DEVICE attention::WorkTile take_tile(const attention::Params& params, attention::WorkTile& queries) {
  attention::WorkTile tile = queries;
  const RowIntervals rows(params.work, tile.batch_head);
  tile.last = min(tile.first + Height, tile.last);
  const int next = next_sequence<Height>(rows, tile.first, tile.last);
  if (rows.hi[next - 1] - rows.lo[tile.first] > 2 * Width) tile.last = next;
  queries.first = tile.last;
  return tile;
}

}  // namespace cuflash::sm90
