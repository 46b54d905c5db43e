#pragma once
#include <attention/block_iterator.cuh>
#include <sm90/constants.cuh>
#include <sm90/query_state.cuh>
#include <tile/counter.cuh>

// The order in which dQ is summed, for the heads whose dQ the backward kernel finishes. Of the tiles of keys that visit
// a query, the last one along the sequence stores its part of dQ, the tiles before it add theirs, and the first one
// loads the sums, adds its own part, and writes dQ. Thus no kernel has to set sums to 0 first, and none has to round
// them afterwards. Every query must see the first tile of keys, and every tile of keys must be seen by some query, as
// without a mask or under a causal mask. Blocks take tiles in the order of FusedDqTileOrder; within a head, a tile
// waits only for tiles that were taken earlier.
namespace cuflash::sm90 {

// State of dQ of a batch entry and head, which all blocks that process its tiles of keys share.
struct DqSemaphore {
  int stored;  // a bit for each tile that has stored all its sums; bit 0 belongs to the last tile of keys
  int done;  // number of tiles that have added or stored all their sums
};

// The condition that a step waits for before it adds to sums or loads them, and the signal that it gives afterwards.
struct DqSemaphoreOp {
  DqSemaphore* semaphore;
  int awaited_bits_or_count;  // bits of `stored`, or a count of `done`; 0 if the step does not wait
  int stored;  // bit that the step signals, or 0
  bool is_done;
};

// The schedule of a tile of keys: what it waits for and signals as it visits the queries of a head.
struct DqSchedule {
  DqSemaphore* semaphore;  // null if blocks do not finish dQ in order
  int next;  // end of the next step that waits or signals, at the latest
  int bit;  // the tile's bit, if it stores sums
  int awaited_bits_or_count;  // bits of other tiles; for the tile that finishes, the number of tiles that must be done
  bool stores, finishes;  // whether the tile stores, or finishes, dQ of the next steps' queries

  CUFLASH_DEVICE DqSemaphoreOp at(int stop, int seqlen_q) {
    const bool is_last = stop == seqlen_q, was_stored = stores;  // evaluated before the schedule advances
    const DqSemaphoreOp op{semaphore, was_stored ? 0 : awaited_bits_or_count, was_stored ? bit : 0,
                           is_last && !finishes};
    if (!was_stored) awaited_bits_or_count = 0;
    stores = false;
    next = was_stored ? 0 : seqlen_q;
    return op;
  }
};

CUFLASH_DEVICE DqSemaphore* dq_semaphore(const Params& params, const QueryState& query_state,
                                         const BatchHead& batch_head) {
  return query_state.dq_semaphores + batch_head_number(params.shape, batch_head);
}
CUFLASH_DEVICE bool is_dq_fused(const Params& params, const BatchHead& batch_head) {
  return batch_head_number(params.shape, batch_head) < params.shape.num_fused_dq_heads;
}

// Return the schedule of a tile of keys. Called by one thread.
template <int Height, int Width>
CUFLASH_DEVICE DqSchedule dq_schedule(const Params& params, const QueryState& query_state, const WorkTile& work) {
  constexpr int kNever = 1 << 30;
  if (!is_dq_fused(params, work.batch_head)) return {nullptr, kNever, 0, 0, false, false};
  const Shape& shape = params.shape;
  DqSemaphore* const semaphore = dq_semaphore(params, query_state, work.batch_head);
  const int last = (shape.seqlen_kv - 1) / Width, from_last = last - work.first / Width;
  if (from_last == last) return {semaphore, 0, 0, last, false, true};
  const int upper = clamped_to_int(params.work.upper);
  // index of the tile of keys that stores the sums of the first queries
  const int first_stored = min((min(Height, shape.seqlen_q) - 1 + upper) / Width, last);
  const int awaited_bits_or_count = (1 << min(from_last, last - first_stored + 1)) - 1;
  if (last - from_last < first_stored) return {semaphore, 0, 0, awaited_bits_or_count, false, false};
  // rounded down to whole tiles of queries
  const int stop = from_last == 0 ? shape.seqlen_q : (work.last - upper) / Height * Height;
  return {semaphore, stop, 1 << min(from_last, 31), awaited_bits_or_count, true, false};
}

// Reset the state of a head. Called by an earlier kernel than the one that uses it.
CUFLASH_DEVICE void reset_dq_semaphore(const Params& params, const QueryState& query_state,
                                       const BatchHead& batch_head) {
  if (is_dq_fused(params, batch_head)) *dq_semaphore(params, query_state, batch_head) = {};
}
// Return whether a tile of keys stores the sums of a tile of queries before others add to them. This is not so if only
// one tile of keys visits the queries.
template <int Width>
CUFLASH_DEVICE bool stores_dq(const Params& params, const WorkTile& queries) {
  return is_dq_fused(params, queries.batch_head) && interval(params, queries.batch_head, queries.last - 1).hi > Width;
}

// Wait as an operation requires. The second function signals the operation once the copies to the sums are complete.
// Called by whole warps.
CUFLASH_DEVICE void wait_dq_semaphore(const DqSemaphoreOp& op, bool finishes) {
  if (finishes) {
    tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count);
    tile::reset_counter(op.semaphore);  // reset for the next launch: no other block still reads it
  } else {
    tile::wait_for_bits(&op.semaphore->stored, op.awaited_bits_or_count);
  }
}
CUFLASH_DEVICE void signal_dq_semaphore(const DqSemaphoreOp& op) {
  tile::wait_bulk_copies();
  tile::signal(&op.semaphore->stored, op.stored);
  tile::signal(&op.semaphore->done, op.is_done);
}

}  // namespace cuflash::sm90
