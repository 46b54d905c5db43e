#pragma once
#include <attention/dq_turns.cuh>
#include <attention/known_queries.cuh>
#include <attention/steps.cuh>
#include <attention/tensor_maps.cuh>
#include <attention/warpgroup_gradient.cuh>
#include <tile/rooms.cuh>

// What backward passes on Hopper share: a block keeps a tile of keys and walks the queries that visit it, over the query
// heads that share it; then it goes on to a tile that no block has, whose first queries are brought meanwhile. One
// warpgroup brings Q, dO and what is known of each query; two multiply, or one, where dQ has a kernel of its own.
namespace cuflash {

using config::kNumStages;

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr bool kMakesDq = config::kDqAdds > 0;
constexpr int kConsumers = kMakesDq ? 2 : 1;
constexpr int kRegisters = kMakesDq ? 168 : 128;  // that a block starts with, and moves
constexpr int kProducerRegisters = kMakesDq || kHeadDim > 64 || kValueDim > 64 ? 24 : 40;
constexpr int kConsumerRegisters = kMakesDq ? 240 : 256 - kProducerRegisters;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= kRegisters * (1 + kConsumers),
              "else groups wait for ever");
static_assert(kThreads == kGroup * (1 + kConsumers), "a producer, and consumers");
static_assert(kNumStages >= 2, "Q of a step is read while scores of the next are made");

// Names of barriers; a warpgroup of consumers has one of each kind that says Ds or Dq.
constexpr int kConsumersMeet = 1, kDsIsRead = 2, kDqIsRead = 4, kDqIsThere = 6;

// Up to 128 columns a warpgroup has rows of dK and dV, and only dS goes through shared memory; beyond, it has columns of
// them, and of P and dS as much goes there as both need.
constexpr bool kIsWide = kHeadDim > 128 || kValueDim > 128;
// Threads that say and copy what is brought: the last warp of theirs adds dQ up, where that goes through shared memory.
constexpr int kProducers = kIsWide ? kGroup : kGroup - 32, kHelpers = kProducers - 32;
// Blocks finish dQ: where tiles of keys see all in order (attention/dq_turns.cuh); or, of a list, whoever comes last.
constexpr bool kFinishesInTurn = config::kFinishesDq && !config::kIsListed;
static_assert(!kIsWide || kMakesDq, "who makes dQ not has all of dK and dV in registers");
static_assert(!config::kFinishesDq || (kMakesDq && !kIsWide), "dQ goes through its room");
// Up to 128 columns P's minimum with 1 is left out where no lse is large.
constexpr bool kLeavesMinimaOut = !kIsWide;
constexpr int kScoreRooms = kIsWide ? 3 : kMakesDq ? 1 : 0;  // P of even and of odd steps and dS; or dS

using KPanels = tile::PanelTile<Element, kBlockKv, kHeadDim, kIsWide && kHeadDim % 128 != 0 ? 32 : tile::panel_width(kHeadDim)>;
using VPanels = tile::PanelTile<Element, kBlockKv, kValueDim>;
using QPanels = tile::PanelTile<Element, kBlockQ, kHeadDim>;
using DoPanels = tile::PanelTile<Element, kBlockQ, kValueDim>;
constexpr int kScoreBytes = 2 * kBlockQ * kBlockKv;
constexpr int kMostBytes = 227 << 10, kToldBytes = 5 << 10;  // of a block's shared memory; what of it is no tile
constexpr int kTileBytes = KPanels::kBytes + VPanels::kBytes + kNumStages * QPanels::kBytes + kScoreRooms * kScoreBytes;
// Stages of dO: one where no more find room.
constexpr int kDoStages = !kIsWide || kTileBytes + kNumStages * DoPanels::kBytes + kToldBytes <= kMostBytes ? kNumStages : 1;
static_assert(kDoStages == kNumStages || kNumStages == 2, "of two stages, the one says whose turn the other's phase is");
// Consumers say of dO by itself that they have left it, not only with Q: where it has fewer stages; and at 128 columns, where
// what ptxas makes of all that follows is 5 % faster with it.
constexpr bool kLeavesDo = kDoStages < kNumStages || (!kIsWide && kBlockQ == 64);

constexpr KPanels k_smem{0};
constexpr VPanels v_smem{KPanels::kBytes};
constexpr int kQ = v_smem.start + VPanels::kBytes;  // stages of Q, then of dO
constexpr int kDo = kQ + kNumStages * QPanels::kBytes;
constexpr int kScoreRoom = kDo + kDoStages * DoPanels::kBytes;
constexpr int kDqRoom = kScoreRoom + kScoreRooms * kScoreBytes;  // a part of dQ for each warpgroup
constexpr int kDqPart = 4 * kBlockQ * kHeadDim / kConsumers;
constexpr bool kAddsDqUp = kMakesDq && !kIsWide;  // by way of that room
constexpr int kBoard = kDqRoom + (kAddsDqUp ? kConsumers * kDqPart : 0);
CUFLASH_DEVICE QPanels q_smem(int stage) { return {kQ + stage * QPanels::kBytes}; }
CUFLASH_DEVICE DoPanels do_smem(int stage) { return {kDo + stage * DoPanels::kBytes}; }
CUFLASH_DEVICE int dq_room(int part) { return kDqRoom + part * kDqPart; }

// What the producer says of a step; in one word what all ask for.
struct Note {
  // Some key of the tile is hidden from some query; K is brought, and V, with a tile's first step; no tile is left; and,
  // which is known with its queries, some query's lse is large. Then what helpers copy; and the parities of the phases that
  // fill the rooms of K and V.
  enum Kind {
    kMasked = 1, kBringsK = 2, kBringsV = 4, kEnd = 8, kLarge = 16,
    kCopiesK = 32, kCopiesV = 64, kCopiesQ = 128, kCopiesDo = 256, kParityOfK = 512, kParityOfV = 1024,
    kFinishesDq = 2048, kStoresDq = 4096, kTurnsDq = 8192  // as attention::DqTurn says; the last where DqStep does
  };
  int kind;
  int work;  // which
  float* dq_sum;
  attention::DqStep dq;  // where something is waited for, or told
  int* visits;           // of its queries, where who comes first stores
  attention::Step step;  // where something is masked or copied, or dQ is finished
  uint32_t live[kLiveWords];  // of queries that are copied
  tile::InStack k_at, v_at;   // where they are brought

  CUFLASH_DEVICE bool is(Kind which) const { return kind & which; }
};
CUFLASH_DEVICE int k_parity(int kind) { return (kind & Note::kParityOfK) != 0; }
CUFLASH_DEVICE int v_parity(int kind) { return (kind & Note::kParityOfV) != 0; }

// What is known of the queries of a step, and which keys of the tile each sees, unless consumers need not ask: a bit a key
// in the row of a query, or, where rows of scores are keys, a bit a query in the row of a key.
constexpr int kKeyWords = (kBlockKv + 31) / 32, kQueryWords = kBlockQ / 32;
struct alignas(16) Queries {
  KnownQueries known;
  uint32_t seen[kIsWide ? kBlockQ : kBlockKv][kIsWide ? kKeyWords : kQueryWords];
};

// The stage that a step has in the rings, and the parity of its phase.
struct Turn {
  int stage = 0, parity = 0;

  CUFLASH_DEVICE Turn next() const {
    const bool is_last = stage == kNumStages - 1;
    return {is_last ? 0 : stage + 1, parity ^ is_last};
  }
};

// The same of dO, of which there may be one.
CUFLASH_DEVICE int do_stage(const Turn& turn) { return kDoStages == 1 ? 0 : turn.stage; }
CUFLASH_DEVICE int do_parity(const Turn& turn) { return kDoStages == 1 ? turn.stage : turn.parity; }

// A tile of keys and a head of queries: where lies what its steps ask for.
struct HeadWork {
  attention::WorkTile tile;
  KnownQueries* known;  // tile after tile
  float* dq_sum;
  tile::InStack q_at, do_at;
  int kind;  // of all of its steps
  attention::DqTurn dq;
};

// What consumers do with dQ of a step: have it added to the sums, or finish it, alone or with the sums of others.
enum class Finish : int { kNot, kAlone, kWithSums };

// Steps that helpers may be at, and one that the producer goes on to.
constexpr int kWorks = kNumStages + 1;

struct Board {
  Queries queries[kNumStages];
  tile::Room k, v, q[kNumStages], d_o[kDoStages];
  uint64_t noted[kNumStages];  // helpers may read the note
  Note notes[kNumStages];
  HeadWork works[kWorks];  // of heads that have steps, in turn
  float softmax_scale_log2;
  // The producer's own, whose registers are few: whether it has a tile, the parities of the next K and V as a note says them,
  // and how far a head reaches.
  int has_tile, parities;
  attention::Reach reach;
  Finish finish;  // of a step, where the last to come finishes dQ
  uint64_t dq_taken;  // sums of dQ are in its room
};
CUFLASH_DEVICE Board& board() { return *reinterpret_cast<Board*>(ptx::dynamic_shared<unsigned char>() + kBoard); }

// ---- the consumers ----

// Wait for a step, and say its kind. Early: what a consumer asks shared memory for once products have started comes late.
CUFLASH_DEVICE int await_step(const Turn& turn) {
  Board& own = board();
  tile::await_full(own.q[turn.stage], turn.parity);
  int kind = own.notes[turn.stage].kind;
  if constexpr (kLeavesMinimaOut) kind |= own.queries[turn.stage].known.has_large ? Note::kLarge : 0;
  return kind;
}
CUFLASH_DEVICE bool is_of_next_tile(int kind) { return kind & (Note::kBringsV | Note::kEnd); }

// K of another head, where a step brings it, once the last one's products are waited for.
CUFLASH_DEVICE void await_other_k(int kind) {
  if ((kind & (Note::kBringsK | Note::kBringsV)) != Note::kBringsK) return;
  Board& own = board();
  tile::arrive(own.k.empty);
  tile::await_full(own.k, k_parity(kind));
}

// K and V of a tile whose first step has come; and where they are read.
CUFLASH_DEVICE void await_keys(int kind) {
  Board& own = board();
  tile::await_full(own.k, k_parity(kind));
  tile::await_full(own.v, v_parity(kind));
}
CUFLASH_DEVICE void leave_keys() { tile::arrive(board().k.empty); }  // V with K

// ---- the producer ----

// Its first warp says what is to be brought and has it copied by the tensor memory accelerator; others find out about a
// step's queries, and copy what the accelerator cannot; the last one may have parts of dQ added.

CUFLASH_DEVICE bool leads() { return ptx::is_elected(); }

// The keys of the tile that some query of the head may see. What stands at others must not reach dQ, where it would meet
// a dS of 0.
CUFLASH_DEVICE attention::Interval seen_keys(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  return {max(work.first, interval(params, work.place, 0).lo),
          min(work.last, interval(params, work.place, params.shape.seqlen_q - 1).hi)};
}

// Whether the room of a step has rows that must be 0: queries without a key, whatever they bring, and rows of the matrix
// past the step. Called by the first warp.
CUFLASH_DEVICE bool has_dead_rows(const attention::Params& params, const HeadWork& work, const attention::Step& step) {
  using namespace attention;
  if (step.stop < min(step.start + kBlockQ, params.shape.seqlen_q)) return true;
  if (step.kind == Kind::kFull) return false;
  if (!Listed::in(params.work) && params.work.lo == nullptr) {  // of a band, which ends at both ends
    const Place& place = work.tile.place;
    const Interval first = interval(params, place, step.start), last = interval(params, place, step.stop - 1);
    return first.lo >= first.hi || last.lo >= last.hi;
  }
  return work.known[query_tile_number<Listed>(params, step.start, kBlockQ)].has_dead;
}

// Have an operand brought, or say that a helper brings it; with it come so many bytes by other copies.
CUFLASH_DEVICE void fill(const tile::Panels& to, const attention::Mapped& map, const tile::InStack& at, int first,
                         const tile::Room& room, bool helpers_copy, int bytes_beside = 0) {
  if (helpers_copy) ptx::mbarrier_arrive_expect(ptx::shared_address(&room.full), bytes_beside);
  else tile::start_copies(to, map, at, first, room.full, bytes_beside);
}

// Keys that no query sees: consumers do not hear of them. By a warp.
CUFLASH_DEVICE void write_nothing(const attention::Params& params, const attention::Matrices& to,
                                  const attention::WorkTile& work, int num_columns) {
  using namespace attention;
  const int head = work.place.head / params.shape.group_size;
  if (to.is_wide) tile::clear(matrix<float>(to, work.place, head, work.last, num_columns).rows(work.first, work.last));
  else tile::clear(matrix<Element>(to, work.place, head, work.last, num_columns).rows(work.first, work.last));
}

// Go on to a tile, which is noted; false where none is left. Called by the first warp.
CUFLASH_DEVICE bool next_tile(const attention::Params& params, int slot) {
  Board& own = board();
  __syncwarp();
  if (threadIdx.x == 0) {  // an election takes registers, which are few
    const int num_tiles = attention::num_key_tiles<Listed>(params, kBlockKv);
    int number;
    if constexpr (kFinishesInTurn) number = attention::number_in_order(params, num_tiles);
    else number = own.has_tile ? attention::next_number(params, num_tiles) : attention::first_number();
    own.has_tile = number < num_tiles;
    if (own.has_tile)
      own.works[ptx::opaque(slot)].tile = kFinishesInTurn
                                              ? attention::finishing_key_tile_at<Listed>(params, kBlockKv, number)
                                              : attention::key_tile_at<Listed>(params, kBlockKv, number);
  }
  __syncwarp();
  return own.has_tile;
}

// The queries that a tile of keys reaches. Where lengths say it, eight threads search together for each end. Called by the
// first warp.
CUFLASH_DEVICE void find_reach(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const int end = ptx::thread() / 8, number = ptx::thread() % 8;  // start, stop, full_start, full_stop
  const int key = end == 0 || end == 3 ? work.first : work.last - 1;
  int first = 0, last = params.shape.seqlen_q;
  if (params.work.lo == nullptr) {
    first = end % 2 == 0 ? rows_ending_by(params, work.place, key) : rows_starting_by(params, work.place, key);
  } else {
    while (__any_sync(0xffffffffu, first < last)) {
      const int width = (last - first + 8) / 9, row = first + (number + 1) * width - 1;
      const Interval keys = interval(params, work.place, min(row, params.shape.seqlen_q - 1));
      const bool is_before = row < last && (end % 2 == 0 ? keys.hi : keys.lo) <= key;
      const int num_before = __popc(__ballot_sync(0xffffffffu, is_before) >> 8 * end & 0xff);
      if (num_before < 8) last = min(last, first + (num_before + 1) * width - 1);  // else nobody looked there
      first += num_before * width;
    }
  }
  const auto found = [&](int which) { return __shfl_sync(0xffffffffu, first, 8 * which); };
  Reach reach{found(0), found(1), found(2), found(3)};
  if (!leads()) return;
  find_places(params, work, reach);
  board().reach = from_whole_tiles(params, reach, kBlockQ);
}

// Have a tile's steps brought. Called by the first warp.
CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps, Turn& turn, int& slot,
                            bool& has_stepped) {
  using namespace attention;
  Board& own = board();
  const Shape& shape = params.shape;
  bool has_k = false;
  for (int head = 0; head < shape.group_size; head = ptx::opaque(head + 1)) {  // asked at its end: registers are few
    __syncwarp();
    if (head > 0) {
      const int next_slot = has_stepped ? (slot + 1) % kWorks : slot;
      if (leads()) {
        own.works[next_slot].tile = own.works[slot].tile;
        ++own.works[next_slot].tile.place.head;
      }
      slot = next_slot;
    }
    has_stepped = false;
    __syncwarp();
    HeadWork& head_work = own.works[slot];
    const WorkTile& work = head_work.tile;
    find_reach(params, work);
    if (leads()) {
      const Place& place = work.place;
      head_work.known = known_queries(params, place);
      ptx::keep_loads_apart();  // registers are few
      if constexpr (kMakesDq) head_work.dq_sum = matrix<float>(params.dq_sum, place, place.head, 0, 0).data;
      head_work.q_at = in_stack(params.q, place, place.head);
      head_work.do_at = in_stack(params.do_, place, place.head);
      head_work.kind = (work.last - work.first == kBlockKv ? 0 : Note::kMasked) |
                       (is_mapped(maps.q, params.q) ? 0 : Note::kCopiesQ) |
                       (is_mapped(maps.do_, params.do_) ? 0 : Note::kCopiesDo);
      if constexpr (kFinishesInTurn) {
        head_work.dq = dq_turn<kBlockQ, kBlockKv>(params, work);
        head_work.kind |= (head_work.dq.finishes ? Note::kFinishesDq : 0) | (head_work.dq.stores ? Note::kStoresDq : 0);
      }
    }
    __syncwarp();
    Steps<kBlockQ, OverQueries, Listed> steps(params, own.reach);
    Step step;
    for (bool brings_k = !has_k || params.work.interval_head_stride != 0; steps.next(step); brings_k = false) {
      const bool clears = has_dead_rows(params, head_work, step);
      Note& note = own.notes[turn.stage];
      tile::await_empty(own.q[turn.stage], turn.parity);  // by the whole warp: none misses a phase
      __syncwarp();
      if (leads()) {
        if constexpr (kFinishesInTurn) {  // before all else, as registers are few
          constexpr int kTold = Note::kStoresDq | Note::kTurnsDq;
          DqTurn& dq = head_work.dq;
          if (step.stop >= dq.next) {
            head_work.kind = (head_work.kind & ~kTold) | Note::kTurnsDq | (dq.stores ? Note::kStoresDq : 0);
            note.dq = dq.at(step.stop, shape.seqlen_q);
          } else if (head_work.kind & Note::kTurnsDq) {
            head_work.kind &= ~Note::kTurnsDq;
          }
        }
        const bool is_whole = step.kind == Kind::kFull && step.stop - step.start == kBlockQ;
        int kind = head_work.kind | own.parities | (is_whole ? 0 : Note::kMasked);
        if (clears) kind |= Note::kCopiesQ | Note::kCopiesDo;
        if (brings_k) {
          const Interval keys = seen_keys(params, work);
          const bool copies_k = keys.lo > work.first || keys.hi < min(work.first + kBlockKv, shape.seqlen_kv) ||
                                !is_mapped(maps.k, params.k);
          kind |= Note::kBringsK | (copies_k ? Note::kCopiesK : 0);
          if (!has_k) kind |= Note::kBringsV | (is_mapped(maps.v, params.v) ? 0 : Note::kCopiesV);
          note.k_at = in_stack(params.k, work.place, work.place.head / shape.group_size);
          note.v_at = in_stack(params.v, work.place, work.place.head / shape.group_size);
        }
        note.kind = kind;
        note.work = slot;
        const int number = query_tile_number<Listed>(params, step.start, kBlockQ);
        if constexpr (kMakesDq) note.dq_sum = head_work.dq_sum + number * params.dq_sum.row_stride;
        KnownQueries& known = head_work.known[number];
        if constexpr (kFirstStoresDq && kMakesDq) note.visits = &known.visits.count;
        if (kLastFinishesDq || kind & (Note::kMasked | Note::kCopiesQ | Note::kCopiesDo | Note::kFinishesDq)) note.step = step;
        if (kind & (Note::kCopiesQ | Note::kCopiesDo)) {
#pragma unroll 1
          for (int x = 0; x < kLiveWords; ++x) note.live[x] = known.live[x];
        }
        fill(tile::Panels(q_smem(turn.stage)), maps.q, head_work.q_at, step.start, own.q[turn.stage], kind & Note::kCopiesQ,
             sizeof known);
        ptx::bulk_load(ptx::shared_address(&own.queries[turn.stage].known), &known, sizeof known,
                       ptx::shared_address(&own.q[turn.stage].full));
        ptx::mbarrier_arrive(ptx::shared_address(&own.noted[turn.stage]));
        if (brings_k) {  // helpers have them brought once their rooms are empty: from the cache, by then
          if (!note.is(Note::kCopiesK)) tile::prefetch(tile::Panels(k_smem), maps.k, note.k_at, work.first);
          if (!has_k && !note.is(Note::kCopiesV)) tile::prefetch(tile::Panels(v_smem), maps.v, note.v_at, work.first);
          own.parities ^= Note::kParityOfK | (has_k ? 0 : Note::kParityOfV);
        }
      }
      has_k = true;
      const tile::Room& d_o = own.d_o[do_stage(turn)];
      if constexpr (kLeavesDo) tile::await_empty(d_o, do_parity(turn));  // else Q's stage says it
      __syncwarp();
      if (leads())
        fill(tile::Panels(do_smem(do_stage(turn))), maps.do_, head_work.do_at, step.start, d_o, note.is(Note::kCopiesDo));
      turn = turn.next();
      has_stepped = true;
    }
  }
  if (has_k) return;
  write_nothing(params, params.dk, own.works[slot].tile, shape.head_dim);
  write_nothing(params, params.dv, own.works[slot].tile, shape.value_dim);
}

CUFLASH_DEVICE void produce(const attention::Params& params, const attention::TensorMaps& maps) {
  Board& own = board();
  Turn turn;
  int slot = 0;  // of the works
  bool has_stepped = false;
  while (next_tile(params, slot)) {
    if (!own.works[slot].tile.is_empty()) produce(params, maps, turn, slot, has_stepped);
    if (has_stepped) slot = (slot + 1) % kWorks;
    has_stepped = false;
  }
  tile::await_empty(own.q[turn.stage], turn.parity);
  __syncwarp();
  if (leads()) {
    own.notes[turn.stage].kind = Note::kEnd;
    own.queries[turn.stage].known.has_large = 0;  // asked of every step
    ptx::mbarrier_arrive(ptx::shared_address(&own.q[turn.stage].full));
    ptx::mbarrier_arrive(ptx::shared_address(&own.noted[turn.stage]));
  }
}

static_assert(kIsWide || kBlockQ % kHelpers == 0, "whole warps of helpers have rows");

// Bits lo <= x < hi of a word.
CUFLASH_DEVICE uint32_t bits_of(int lo, int hi) { return ptx::bits_from(lo) & ~ptx::bits_from(hi); }

// Which of the 32 keys from `first` on a query sees; there are none from `last` on.
CUFLASH_DEVICE uint32_t seen_bits(const attention::Seen& seen, int first, int last) {
  uint32_t bits = bits_of(seen.lo - first, min(seen.hi, last) - first);
  if (config::kIsListed && seen.bits != nullptr) {
    uint32_t listed = 0;
#pragma unroll 1
    for (int key = 0; key < 32 && first + key < last; key += 8)
      listed |= static_cast<uint32_t>(seen.bits[(first + key - seen.first_key) / 8]) << key;
    bits &= listed;
  }
  return bits;
}

// Under a band the queries that see a key of the tile are one interval, which starts and ends one later for the next key.
CUFLASH_DEVICE void know_keys(const attention::Params& params, const attention::WorkTile& work, const attention::Step& step,
                              Queries& queries, int thread) {
  using namespace attention;
  const bool is_full = step.kind == Kind::kFull;
  const int start = work.first - step.start;
  const int first = is_full ? -kBlockKv : bounded(start - params.work.upper);
  const int last = is_full ? kBlockQ : bounded(start - params.work.lower + 1);
#pragma unroll 1
  for (int key = thread; key < kBlockKv; key += kHelpers) {
    const int lo = first + key, hi = key < work.last - work.first ? min(last + key, step.stop - step.start) : 0;
#pragma unroll
    for (int x = 0; x < kQueryWords; ++x) queries.seen[key][x] = bits_of(lo - 32 * x, hi - 32 * x);
  }
}

CUFLASH_DEVICE void know_seen(const attention::Params& params, const HeadWork& work, const Note& note, Queries& queries,
                              int thread) {
  using namespace attention;
  if constexpr (!kIsWide)
    if (params.work.lo == nullptr && note.step.kind != Kind::kBits)
      return know_keys(params, work.tile, note.step, queries, thread);
#pragma unroll 1
  for (int first = 0; first < kBlockQ; first += kHelpers) {  // as often for all: they exchange bits
    const int row = first + thread, query = note.step.start + row;
    if (kIsWide && row >= kBlockQ) break;
    const Seen seen = note.step.seen(params, work.tile.place, min(query, note.step.stop - 1));
#pragma unroll 1
    for (int x = 0; x < kKeyWords; ++x) {
      const uint32_t bits = query < note.step.stop ? seen_bits(seen, work.tile.first + 32 * x, work.tile.last) : 0;
      if constexpr (kIsWide) queries.seen[row][x] = bits;
      else queries.seen[32 * x + thread % 32][row / 32] = tile::transpose_in_warp(bits);
    }
  }
}

// Copy rows of a step that the accelerator cannot: zeros where a query sees no key.
template <class Panels>
CUFLASH_DEVICE void copy_queries(const attention::Params& params, const attention::Matrices& from, const Note& note,
                                 int num_columns, Panels to, int thread) {
  using namespace attention;
  const Place& place = board().works[note.work].tile.place;
  const auto all = matrix<Element>(from, place, place.head, params.shape.seqlen_q, num_columns);
  const int last = kIsWide ? note.step.stop : note.step.start + kBlockQ;  // else asked anew for each row: registers are few
  tile::copy<kHelpers>(tile::Panels(to), all.rows(note.step.start, last), thread, [&](int row) {
    return (kIsWide || row < note.step.stop - note.step.start) && KnownQueries::is_live(note.live, row);
  });
}

CUFLASH_DEVICE void help(const attention::Params& params, const attention::TensorMaps& maps) {
  using namespace attention;
  Board& own = board();
  const Shape& shape = params.shape;
  const auto thread = [] { return ptx::thread() - 32; };  // asked for again, as is what follows: registers are few
  for (int number = 0;; number = number == 2 * kNumStages - 1 ? 0 : number + 1) {
    const Turn turn{number % kNumStages, number / kNumStages};  // of one register
    ptx::mbarrier_wait(ptx::shared_address(&own.noted[turn.stage]), turn.parity);
    const Note& note = own.notes[turn.stage];
    if (note.is(Note::kEnd)) return tile::arrive(own.q[turn.stage].full);
    const auto work = [&]() -> const HeadWork& { return own.works[note.work]; };
    if (note.is(Note::kMasked)) know_seen(params, work(), note, own.queries[turn.stage], thread());
    if (note.is(Note::kCopiesQ)) copy_queries(params, params.q, note, shape.head_dim, q_smem(turn.stage), thread());
    tile::arrive(own.q[turn.stage].full);
    if (note.is(Note::kBringsK)) {
      const WorkTile& tile = work().tile;
      const auto kv_head = [&] { return tile.place.head / shape.group_size; };
      tile::await_empty(own.k, k_parity(note.kind));  // else a helper could arrive for this K while another copies the last
      __syncwarp();
      if (thread() == 0) {
        fill(tile::Panels(k_smem), maps.k, note.k_at, tile.first, own.k, note.is(Note::kCopiesK));
        if (note.is(Note::kBringsV))
          fill(tile::Panels(v_smem), maps.v, note.v_at, tile.first, own.v, note.is(Note::kCopiesV));
      }
      if (note.is(Note::kCopiesK)) {
        const Interval keys = seen_keys(params, tile);
        ptx::keep_loads_apart();  // registers are few
        const auto all = matrix<Element>(params.k, tile.place, kv_head(), shape.seqlen_kv, shape.head_dim);
        tile::copy<kHelpers>(tile::Panels(k_smem), all.rows(tile.first, keys.hi), thread(),
                       [&](int row) { return tile.first + row >= keys.lo; });
      }
      tile::arrive(own.k.full);
      if (note.is(Note::kCopiesV)) {
        const auto all = matrix<Element>(params.v, tile.place, kv_head(), shape.seqlen_kv, shape.value_dim);
        const auto is_kept = [](int) { return true; };
        tile::copy<kHelpers>(tile::Panels(v_smem), all.rows(tile.first, tile.last), thread(), is_kept);
      }
      if (note.is(Note::kBringsV)) tile::arrive(own.v.full);
    }
    if constexpr (kDoStages < kNumStages)  // else Q's stage says it
      tile::await_empty(own.d_o[do_stage(turn)], do_parity(turn));
    if (note.is(Note::kCopiesDo))
      copy_queries(params, params.do_, note, shape.value_dim, do_smem(do_stage(turn)), thread());
    tile::arrive(own.d_o[do_stage(turn)].full);
  }
}

// A part of dQ's room may be written anew, once at most kPending additions are not read.
template <int kPending>
CUFLASH_DEVICE void leave_dq(int part, bool is_end) {
  ptx::bulk_wait_read<kPending>();
  __syncwarp();
  if (!is_end) ptx::bar_arrive(kDqIsRead + part, kGroup + 32);
  __syncwarp();  // the simulator's lanes too go on together, so that it sees who arrives too early
}

CUFLASH_DEVICE uint32_t dq_address(int part) {
  return ptx::shared_address(ptx::dynamic_shared<unsigned char>() + dq_room(part));
}

// Have the sums of a step's queries brought to dQ's room, for consumers to add theirs. Called by a warp, none of whose copies
// reads there.
CUFLASH_DEVICE void bring_sums(const float* sum, int parity) {
  Board& own = board();
  if (leads()) {
    ptx::mbarrier_arrive_expect(ptx::shared_address(&own.dq_taken), kConsumers * kDqPart);
    ptx::bulk_load(dq_address(0), sum, kConsumers * kDqPart, ptx::shared_address(&own.dq_taken));
  }
  __syncwarp();
  ptx::mbarrier_wait(ptx::shared_address(&own.dq_taken), parity);
  __syncwarp();
}

// Have a part of dQ, which its consumers have put into its room, stored as sums, or added to them. Called by a warp.
CUFLASH_DEVICE void leave_sums(float* sum, int part, bool stores) {
  ptx::fence_proxy_async();  // of what others wrote: they are waited for
  float* const own = sum + part * kDqPart / 4;
  if (stores) ptx::bulk_store(own, dq_address(part), kDqPart);
  else ptx::bulk_add(own, dq_address(part), kDqPart);
  ptx::bulk_commit();
}

// Whether a step is the first to visit its queries; if not, once the first one has stored their sums. Called by a warp.
CUFLASH_DEVICE bool visits_first(int* visits) {
  using attention::kDqIsStored;
  const int before = tile::take_number_together(visits);
  if (before != 0 && !(before & kDqIsStored)) tile::await_bits(visits, kDqIsStored);
  return before == 0;
}

// Step after step, have what the consumers make of dQ added to the sums, once all of a warpgroup has put it into its room,
// which is left once it is read; or have them add the sums. Called by a warp.
CUFLASH_DEVICE void add_up() {
  Board& own = board();
  int parity = 0;
  for (Turn turn;; turn = turn.next()) {
    tile::await_full(own.q[turn.stage], turn.parity);
    const Note& note = own.notes[turn.stage];
    const int kind = note.kind;
    const bool is_end = kind & Note::kEnd, finishes = kFinishesInTurn && kind & Note::kFinishesDq;
    float* const sum = note.dq_sum;
    int* const visits = note.visits;
    attention::DqStep dq{};
    if (kFinishesInTurn && kind & Note::kTurnsDq) dq = note.dq;
    tile::arrive(own.q[turn.stage].empty);
    if (dq.awaited != 0) attention::await_others(dq, finishes);
    if (finishes) {  // the tile before has told that all of its own copies are made
      bring_sums(sum, parity);
      parity ^= 1;
#pragma unroll
      for (int part = 0; part < kConsumers; ++part) ptx::bar_arrive(kDqIsRead + part, kGroup + 32);
#pragma unroll
      for (int part = 0; part < kConsumers; ++part) ptx::bar_sync(kDqIsThere + part, kGroup + 32);
      continue;
    }
    leave_dq<1>(0, is_end);
    leave_dq<0>(1, is_end);
    if (is_end) return;
    const bool is_first = kFirstStoresDq && visits_first(visits);  // asked now: nothing of an earlier step is to be done
#pragma unroll
    for (int part = 0; part < kConsumers; ++part) {
      ptx::bar_sync(kDqIsThere + part, kGroup + 32);
      leave_sums(sum, part, is_first || (kFinishesInTurn && kind & Note::kStoresDq));
    }
    if (dq.stored != 0 || dq.is_done) attention::tell_others(dq);
    if (is_first) {
      tile::await_copies();
      tile::tell(visits, attention::kDqIsStored);
    }
  }
}

// The same of a list where the last tile of keys to come to queries finishes their dQ. Whoever comes waits for nobody until
// what it did before is told. Called by a warp.
CUFLASH_DEVICE void add_up_or_finish() {
  Board& own = board();
  int parity = 0, count = 0;
  int* untold = nullptr;  // of the step before, whose additions others are to hear of once they are made
  const auto tell = [&] {
    if (untold == nullptr) return;
    tile::await_copies();
    tile::tell(untold, attention::kVisitIsDone);
    untold = nullptr;
  };
  const auto come = [&](const Turn& turn) {  // early: the answer is long in coming
    tile::await_full(own.q[turn.stage], turn.parity);
    if (!own.notes[turn.stage].is(Note::kEnd)) count = tile::ask_together(own.notes[turn.stage].visits);
  };
  Turn turn;
  come(turn);
  while (!own.notes[turn.stage].is(Note::kEnd)) {
    const Note& note = own.notes[turn.stage];
    count = tile::hear_together(count);
    const auto visit = attention::DqVisit::of(count, own.queries[turn.stage].known.visits.num);
    const bool is_last = visit.is_last, is_first = visit.before == 0;
    if (count / attention::kVisitIsDone < visit.awaited) {
      tell();
      attention::await_visits(visit, note.visits);
    }
    if (!is_first) ptx::fence_proxy_async_global();
    if (leads()) own.finish = !is_last ? Finish::kNot : is_first ? Finish::kAlone : Finish::kWithSums;
    __syncwarp();
    if (is_last && !is_first) {
      ptx::bulk_wait_read<0>();
      __syncwarp();
      bring_sums(note.dq_sum, parity);
      parity ^= 1;
    }
    leave_dq<1>(0, false);
    leave_dq<0>(1, false);
    tell();
    const Turn next = turn.next();
    come(next);
#pragma unroll
    for (int part = 0; part < kConsumers; ++part) {
      ptx::bar_sync(kDqIsThere + part, kGroup + 32);
      if (!is_last) leave_sums(note.dq_sum, part, is_first);
    }
    untold = is_last ? nullptr : note.visits;
    tile::arrive(own.q[turn.stage].empty);
    turn = next;
  }
  tell();
}

// ---- all ----

// What a block does: `consume` is called by both warpgroups of consumers, with the number of the warpgroup among them.
template <class Consume>
CUFLASH_DEVICE void share_work(const attention::Params& params, const attention::TensorMaps& maps, Consume consume) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);  // one for the warp: branches do not part it
  if (threadIdx.x == 0) {
    board().softmax_scale_log2 = params.shape.softmax_scale * attention::kLog2E;
    board().has_tile = board().parities = 0;
    tile::Room* const rooms = &board().k;
    for (int i = 0; i < 2 + kNumStages + kDoStages; ++i) {
      const bool has_notes = &rooms[i] >= board().q && &rooms[i] < board().q + kNumStages;  // which all read
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].full), 1 + kHelpers / 32 * tile::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&rooms[i].empty), (4 * kConsumers + (kAddsDqUp && has_notes)) * tile::kArrivals);
    }
    for (uint64_t& noted : board().noted) ptx::mbarrier_init(ptx::shared_address(&noted), 1);
    ptx::mbarrier_init(ptx::shared_address(&board().dq_taken), 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (group == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) produce(params, maps);
    else if (32 * warp < kProducers) help(params, maps);
    else if constexpr (kLastFinishesDq) add_up_or_finish();
    else if constexpr (kAddsDqUp) add_up();
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(group % kConsumers);
  }
}

}  // namespace cuflash
