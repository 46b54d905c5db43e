#pragma once
#include <attention/block_iterator.cuh>
#include <tile/counter.cuh>

// Who does what with the sums of dQ, of the places whose dQ the gradients' own blocks finish. Of the tiles of keys that
// visit a query, the last one along the sequence stores what it makes of dQ, those before it add theirs, and the first one
// takes the sums, adds its own, and writes dQ: so nobody sets sums to 0 beforehand, and no kernel rounds them afterwards.
// The first tile of keys must see every query, and every tile of keys some, as under a causal mask or none. Blocks take
// tiles as FusedDqTileOrder has them, and wait, of a batch entry and head, for tiles that were taken earlier.
namespace cuflash::attention {

// What tiles of keys tell each other of a batch entry and head.
struct DqSemaphore {
  int stored;  // a bit for each tile that has stored all it stores, of the last keys first
  int done;    // how many tiles have added, or stored, all they make
};

// What is waited for before a step of a tile adds to sums, or takes them; and told after it.
struct DqSemaphoreOp {
  DqSemaphore* semaphore;
  int awaited_bits_or_count;  // bits, or how many; or 0
  int stored;                 // the tile's bit, or 0
  bool is_done;
};

// A tile's part in a head of queries.
struct DqSchedule {
  DqSemaphore* semaphore;     // null where blocks do not finish dQ
  int next;                   // where the next step stops, or before, at which something is waited for or told
  int bit;                    // of the tile, if it stores
  int awaited_bits_or_count;  // bits of others; or, of the tile that finishes, how many must be done
  bool stores, finishes;  // what it makes of the next steps' queries

  CUFLASH_DEVICE DqSemaphoreOp at(int stop, int seqlen_q) {
    const bool is_last = stop == seqlen_q, was_stored = stores;  // none of the following ones is
    const DqSemaphoreOp op{semaphore, was_stored ? 0 : awaited_bits_or_count, was_stored ? bit : 0, is_last &&
                           !finishes};
    if (!was_stored) awaited_bits_or_count = 0;
    stores = false;
    next = was_stored ? 0 : seqlen_q;
    return op;
  }
};

CUFLASH_DEVICE DqSemaphore* dq_semaphore(const Params& params, const BatchHead& batch_head) {
  return reinterpret_cast<DqSemaphore*>(static_cast<int*>(params.tile_counter.data) + 2) +
      batch_head_number(params.shape, batch_head);
}
CUFLASH_DEVICE bool is_dq_fused(const Params& params, const BatchHead& batch_head) {
  return batch_head_number(params.shape, batch_head) < params.shape.num_fused_dq_heads;
}

// By one thread.
template <int Height, int Width>
CUFLASH_DEVICE DqSchedule dq_schedule(const Params& params, const WorkTile& work) {
  constexpr int kNever = 1 << 30;
  if (!is_dq_fused(params, work.batch_head)) return {nullptr, kNever, 0, 0, false, false};
  const Shape& shape = params.shape;
  DqSemaphore* const semaphore = dq_semaphore(params, work.batch_head);
  const int last = (shape.seqlen_kv - 1) / Width, from_last = last - work.first / Width;
  if (from_last == last) return {semaphore, 0, 0, last, false, true};
  const int upper = clamped_to_int(params.work.upper);
  const int first_stored = min((min(Height, shape.seqlen_q) - 1 + upper) / Width, last);  // by the first queries' last tile
  const int awaited_bits_or_count = (1 << min(from_last, last - first_stored + 1)) - 1;
  if (last - from_last < first_stored) return {semaphore, 0, 0, awaited_bits_or_count, false, false};
  const int stop = from_last == 0 ? shape.seqlen_q : (work.last - upper) / Height * Height;  // whole tiles of queries
  return {semaphore, stop, 1 << min(from_last, 31), awaited_bits_or_count, true, false};
}

// Before all else: nobody has stored or is done.
CUFLASH_DEVICE void reset_dq_semaphore(const Params& params, const BatchHead& batch_head) {
  if (is_dq_fused(params, batch_head)) *dq_semaphore(params, batch_head) = {};
}
// Whether the sums of a tile of queries are stored before others add to them: not where the first tile of keys is the only one.
template <int Width>
CUFLASH_DEVICE bool stores_dq(const Params& params, const WorkTile& queries) {
  return is_dq_fused(params, queries.batch_head) && interval(params, queries.batch_head, queries.last - 1).hi > Width;
}

// Wait for what a tile waits for; and tell what it has done, once copies to the sums are made. By a whole warp.
CUFLASH_DEVICE void wait_dq_semaphore(const DqSemaphoreOp& op, bool finishes) {
  if (finishes) {
    tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count);
    tile::reset_counter(op.semaphore);  // for a further launch: nobody else asks any more
  } else {
    tile::wait_for_bits(&op.semaphore->stored, op.awaited_bits_or_count);
  }
}
CUFLASH_DEVICE void signal_dq_semaphore(const DqSemaphoreOp& op) {
  tile::wait_bulk_copies();
  tile::signal(&op.semaphore->stored, op.stored);
  tile::signal(&op.semaphore->done, op.is_done);
}

}  // namespace cuflash::attention
