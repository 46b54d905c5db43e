#pragma once
#include <attention/steps.cuh>
#include <tile/count.cuh>

// Who does what with the sums of dQ, of the places whose dQ the gradients' own blocks finish. Of the tiles of keys that
// visit a query, the last one along the sequence stores what it makes of dQ, those before it add theirs, and the first one
// takes the sums, adds its own, and writes dQ: so nobody sets sums to 0 beforehand, and no kernel rounds them afterwards.
// The first tile of keys must see every query, and every tile of keys some, as under a causal mask or none. Blocks take
// tiles as FinishingTurns has them, and wait, of a batch entry and head, for tiles that were taken earlier.
namespace cuflash::attention {

// What tiles of keys tell each other of a batch entry and head.
struct DqCounts {
  int stored;  // a bit for each tile that has stored all it stores, of the last keys first
  int done;    // how many tiles have added, or stored, all they make
};

// What is waited for before a step of a tile adds to sums, or takes them; and told after it.
struct DqStep {
  DqCounts* counts;
  int awaited;  // bits, or how many; or 0
  int stored;   // the tile's bit, or 0
  bool is_done;
};

// A tile's part in a head of queries.
struct DqTurn {
  DqCounts* counts;  // null where blocks do not finish dQ
  int next;          // where the next step stops, or before, at which something is waited for or told
  int bit;           // of the tile, if it stores
  int awaited;       // bits of others; or, of the tile that finishes, how many must be done
  bool stores, finishes;  // what it makes of the next steps' queries

  CUFLASH_DEVICE DqStep at(int stop, int seqlen_q) {
    const bool is_last = stop == seqlen_q, was_stored = stores;  // none of the following ones is
    const DqStep step{counts, was_stored ? 0 : awaited, was_stored ? bit : 0, is_last && !finishes};
    if (!was_stored) awaited = 0;
    stores = false;
    next = was_stored ? 0 : seqlen_q;
    return step;
  }
};

CUFLASH_DEVICE DqCounts* dq_counts(const Params& params, const Place& place) {
  return reinterpret_cast<DqCounts*>(static_cast<int*>(params.next_tile.data) + 2) + place_number(params.shape, place);
}
CUFLASH_DEVICE bool is_finished(const Params& params, const Place& place) {
  return place_number(params.shape, place) < params.shape.finished_places;
}

// By one thread.
template <int Height, int Width>
CUFLASH_DEVICE DqTurn dq_turn(const Params& params, const WorkTile& work) {
  constexpr int kNever = 1 << 30;
  if (!is_finished(params, work.place)) return {nullptr, kNever, 0, 0, false, false};
  const Shape& shape = params.shape;
  DqCounts* const counts = dq_counts(params, work.place);
  const int last = (shape.seqlen_kv - 1) / Width, from_last = last - work.first / Width;
  if (from_last == last) return {counts, 0, 0, last, false, true};
  const int upper = bounded(params.work.upper);
  const int first_stored = min((min(Height, shape.seqlen_q) - 1 + upper) / Width, last);  // by the first queries' last tile
  const int awaited = (1 << min(from_last, last - first_stored + 1)) - 1;
  if (last - from_last < first_stored) return {counts, 0, 0, awaited, false, false};
  const int until = from_last == 0 ? shape.seqlen_q : (work.last - upper) / Height * Height;  // whole tiles of queries
  return {counts, until, 1 << min(from_last, 31), awaited, true, false};
}

// Before all else: nobody has stored or is done.
CUFLASH_DEVICE void reset_dq_counts(const Params& params, const Place& place) {
  if (is_finished(params, place)) *dq_counts(params, place) = {};
}
// Whether the sums of a tile of queries are stored before others add to them: not where the first tile of keys is the only one.
template <int Width>
CUFLASH_DEVICE bool stores_dq(const Params& params, const WorkTile& queries) {
  return is_finished(params, queries.place) && interval(params, queries.place, queries.last - 1).hi > Width;
}

// Wait for what a tile waits for; and tell what it has done, once copies to the sums are made. By a whole warp.
CUFLASH_DEVICE void await_others(const DqStep& step, bool finishes) {
  if (finishes) {
    tile::await_count(&step.counts->done, step.awaited);
    tile::reset(step.counts);  // for a further launch: nobody else asks any more
  } else {
    tile::await_bits(&step.counts->stored, step.awaited);
  }
}
CUFLASH_DEVICE void tell_others(const DqStep& step) {
  tile::await_copies();
  tile::tell(&step.counts->stored, step.stored);
  tile::tell(&step.counts->done, step.is_done);
}

}  // namespace cuflash::attention
