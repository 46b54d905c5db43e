// Copies of tiles and of byte ranges by the tensor memory accelerator. The schedule chooses when copies to shared memory
// complete, at the latest when nothing else can run. Copies to global memory read their source when a thread waits for
// them, and write then or later.
#include <cstdio>

#include "floats.hpp"
#include "memory.hpp"
#include "residents.hpp"
#include "subnormals.hpp"

namespace cuflash::sim {

namespace {

constexpr uint64_t kMagic = 0x70616d726f736e65;
constexpr int kEngines = 32;   // used in rotation
void* engines[kEngines];
unsigned next_engine = 0;

}  // namespace

enum class Type : uint32_t { other, half, bfloat16, single };

// A tensor map; cuflash/executors/tensor_map.py has the same layout.
struct Map {
  uint64_t magic;
  unsigned char* base;
  uint32_t rank, element_bytes, swizzle_bytes;
  Type type;
  uint64_t strides[5];   // in bytes
  uint32_t sizes[5], box[5];
};
static_assert(sizeof(Map) <= 128);

// A piece of 16 bytes in shared memory. Its bytes first <= x < last exist in global memory, where `global` is the address
// of byte 0.
struct Piece { unsigned char* shared; unsigned char* global; int first, last; };

struct Transfer {
  const char* name;
  Location where;
  void* caller;              // the kernel's line, for reports
  void* engine;
  std::vector<Piece> pieces;
  std::vector<unsigned char> data;   // for a store: the source bytes at its issue, and later those that it has read
  Type type = Type::other;
  Mbarrier* barrier = nullptr;
  unsigned phase = 0;        // phase of the barrier when the copy was issued
  int group = 0;
  bool adds = false, is_read = false, is_written = false, is_waited_for = false;
};

namespace {

const Map& map_at(const void* map, const char* name, Location where) {
  const Map& found = *static_cast<const Map*>(map);
  if (found.magic != kMagic) fail(where, "%s: this is not a tensor map, or a copy that a GPU does not accept", name);
  check_aligned(map, 64, name, where);
  check_aligned(found.base, 16, name, where);
  return found;
}

std::unique_ptr<Transfer> new_transfer(const char* name, Location where, void* caller) {
  auto transfer = std::make_unique<Transfer>();
  transfer->name = name;
  transfer->where = where;
  transfer->caller = caller;
  transfer->engine = engines[next_engine++ % kEngines];
  return transfer;
}

// Returns the pieces of a box, after a check that all its elements are within the memory of the tensor.
void cut_box(Transfer& transfer, const Map& map, const Box& box, uint32_t address) {
  const char* name = transfer.name;
  if (static_cast<int>(map.rank) != box.rank)
    fail(transfer.where, "%s: the tensor map has rank %u", name, map.rank);
  transfer.type = map.type;
  const int bytes = static_cast<int>(map.element_bytes);
  if (box.start[0] * bytes % 16)
    fail(transfer.where, "%s: rows of a box start at multiples of 16 bytes; got element %d", name, box.start[0]);
  const size_t row_bytes = size_t(map.box[0]) * map.element_bytes;
  size_t rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) rows *= map.box[i];
  unsigned char* shared = shared_bytes(address, rows * row_bytes, 128, name, transfer.where);
  const uint32_t width = map.swizzle_bytes ? map.swizzle_bytes : 16;
  for (size_t row = 0; row < rows; ++row) {
    bool is_inside = true;
    unsigned char* global = map.base;
    for (size_t i = 1, rest = row; i < map.rank; rest /= map.box[i], ++i) {
      const int64_t x = box.start[i] + static_cast<int64_t>(rest % map.box[i]);
      is_inside &= 0 <= x && x < static_cast<int64_t>(map.sizes[i]);
      global += x * static_cast<int64_t>(map.strides[i]);
    }
    for (size_t column = 0; column < row_bytes; column += 16) {
      const auto at = static_cast<uint32_t>(row * row_bytes + column);
      const int64_t x = box.start[0] + static_cast<int64_t>(column) / bytes, size = map.sizes[0];
      const int64_t first = std::min<int64_t>(std::max<int64_t>(-x * bytes, 0), 16);
      const int64_t last = std::min<int64_t>(std::max<int64_t>((size - x) * bytes, first), 16);
      transfer.pieces.push_back({shared + (swizzled(address + at, width) - address), global + x * bytes,
                                 static_cast<int>(first), is_inside ? static_cast<int>(last) : static_cast<int>(first)});
    }
  }
}

void cut_run(Transfer& transfer, const void* global, uint32_t address, int bytes) {
  if (bytes < 16 || bytes % 16) fail(transfer.where, "%s: copies multiples of 16 bytes; got %d", transfer.name, bytes);
  check_aligned(global, 16, transfer.name, transfer.where);
  unsigned char* shared = shared_bytes(address, static_cast<size_t>(bytes), 16, transfer.name, transfer.where);
  auto* other = static_cast<unsigned char*>(const_cast<void*>(global));
  for (int i = 0; i < bytes; i += 16) transfer.pieces.push_back({shared + i, other + i, 0, 16});
}

void check_global(const Transfer& transfer) {
  for (const Piece& piece : transfer.pieces) {
    const auto bytes = static_cast<size_t>(piece.last - piece.first);
    if (void* outside = bytes ? first_poisoned(piece.global + piece.first, bytes) : nullptr)
      fail(transfer.where, "%s accesses %p, which is outside its buffer", transfer.name, outside);
  }
}

bool is_at_once() {
  const Copies when = launch->request.schedule.copies;
  return when == Copies::eager || (when == Copies::random && launch->random.one_in(2));
}

void land(Cta& cta, Transfer& transfer) {
  check_phase(*transfer.barrier, transfer.phase, transfer.where);
  as_engine(transfer.engine, transfer.caller, [&] {
    for (const Piece& piece : transfer.pieces) {
      unsigned char bytes[16] = {};
      const auto count = static_cast<size_t>(piece.last - piece.first);
      if (count) kernel_reads(piece.global + piece.first, count);
      kernel_writes(piece.shared, 16);
      Unwatched unwatched;
      if (count) note_access(cta, piece.global + piece.first, count, Kind::read, {nullptr, transfer.where});
      if (count) memcpy(bytes + piece.first, piece.global + piece.first, count);
      write_shared(cta, piece.shared, bytes, 16);
    }
    release(&transfer.barrier->clocks[transfer.phase & 1].threads);
    release(&transfer.barrier->clocks[transfer.phase & 1].proxy);
  });
  complete(*transfer.barrier, static_cast<int>(16 * transfer.pieces.size()), transfer.where);
}

// Earlier reads and writes must be complete by now, because the copy may complete at any time after its issue.
void leave_in_flight(Cta& cta, Transfer& transfer) {
  if (!launch->request.schedule.poison) return;
  as_engine(transfer.engine, transfer.caller, [&] {
    unsigned char poison[16];
    memset(poison, 0xff, 16);
    for (const Piece& piece : transfer.pieces) {
      kernel_writes(piece.shared, 16);
      Unwatched unwatched;
      write_shared(cta, piece.shared, poison, 16);
    }
  });
}

void check_untouched(const Cta& cta, const Transfer& transfer) {
  if (!launch->request.schedule.poison) return;
  for (const Piece& piece : transfer.pieces)
    for (int i = 0; i < 16; ++i)
      if (piece.shared[i] != 0xff)
        fail(transfer.where, "%s: shared offset %td was written to while the copy was pending", transfer.name,
             piece.shared + i - cta.shared);
}

void start_load(std::unique_ptr<Transfer> transfer, uint32_t barrier) {
  Thread& me = self();
  Cta& cta = *me.cta;
  transfer->barrier = &mbarrier_at(barrier, transfer->name, transfer->where);
  transfer->phase = transfer->barrier->phase;
  if (!transfer->barrier->is_fenced)
    fail(transfer->where, "%s: the barrier made at %s was not followed by mbarrier_init_fence", transfer->name,
         place(transfer->barrier->where).letters);
  check_global(*transfer);
  release(&me.store_groups);
  as_engine(transfer->engine, nullptr, [&] { acquire(&me.store_groups); });
  if (is_at_once()) return land(cta, *transfer);
  leave_in_flight(cta, *transfer);
  cta.loads.push_back(std::move(transfer));
}

void read_source(const Cta& cta, Transfer& store) {
  as_engine(store.engine, store.caller, [&] {
    for (size_t i = 0; i < store.pieces.size(); ++i) {
      const unsigned char* shared = store.pieces[i].shared;
      kernel_reads(shared, 16);
      Unwatched unwatched;
      if (memcmp(&store.data[16 * i], shared, 16) != 0)
        fail(store.where, "%s: shared offset %td was written to before the copy had read it", store.name,
             shared - cta.shared);
      check_fenced(shared, 16, store.name, store.where);
    }
    release(store.engine);
  });
  store.is_read = true;
}

template <class T, T (*kSum)(T, T)>
void add(unsigned char* to, const unsigned char* value) {
  T term, old;
  memcpy(&term, value, sizeof term);
  std::atomic_ref<T> place(*reinterpret_cast<T*>(to));
  old = place.load(std::memory_order_relaxed);
  while (!place.compare_exchange_weak(old, kSum(old, term), std::memory_order_relaxed)) {}
}
float sum_single(float a, float b) { return a + b; }
uint16_t sum_half(uint16_t a, uint16_t b) { return float_to_half(half_to_float(a) + half_to_float(b)); }
uint16_t sum_bfloat16(uint16_t a, uint16_t b) { return float_to_bfloat16(bfloat16_to_float(a) + bfloat16_to_float(b)); }

void write_target(const Cta& cta, Transfer& store) {
  as_engine(store.engine, store.caller, [&] {
    for (size_t i = 0; i < store.pieces.size(); ++i) {
      const Piece& piece = store.pieces[i];
      const unsigned char* from = &store.data[16 * i];
      const auto count = static_cast<size_t>(piece.last - piece.first);
      if (!store.adds && count) kernel_writes(piece.global + piece.first, count);
      Unwatched unwatched;
      if (count)
        note_access(cta, piece.global + piece.first, count, store.adds ? Kind::atomic_write : Kind::write, {nullptr, store.where});
      const Subnormals flushed(false);
      if (!store.adds) memcpy(piece.global + piece.first, from + piece.first, count);
      else if (store.type == Type::single)
        for (int at = piece.first; at < piece.last; at += 4) add<float, sum_single>(piece.global + at, from + at);
      else
        for (int at = piece.first; at < piece.last; at += 2)
          (store.type == Type::half ? add<uint16_t, sum_half> : add<uint16_t, sum_bfloat16>)(piece.global + at, from + at);
    }
    release(store.engine);
  });
  store.is_written = true;
}

void start_store(std::unique_ptr<Transfer> store) {
  Thread& me = self();
  check_global(*store);
  if (store->adds && store->type == Type::other)
    fail(store->where, "%s adds float, float16 and bfloat16; the tensor map has another type", store->name);
  store->group = me.store_groups;
  for (const Piece& piece : store->pieces) store->data.insert(store->data.end(), piece.shared, piece.shared + 16);
  as_engine(me.proxy, nullptr, [&] { release(&me.proxy); });
  as_engine(store->engine, nullptr, [&] { acquire(&me.proxy); });
  if (is_at_once()) {
    read_source(*me.cta, *store);
    write_target(*me.cta, *store);
  }
  me.stores.push_back(std::move(store));
}

// Returns whether more lanes of the warp will reach the fence that this lane is at, as they did the last time.
bool awaits_other_lanes(Location where) {
  const Thread& me = self();
  FenceRound* round = nullptr;
  auto& rounds = launch->fence_rounds[static_cast<size_t>(me.cta->slot * kMaxWarps + me.warp->index)];
  for (FenceRound& known : rounds)
    if (known.where.line() == where.line() && known.where.file_name() == where.file_name()) round = &known;
  if (!round) round = &rounds.emplace_back(FenceRound{where});
  if (round->lanes >> me.lane & 1) *round = FenceRound{where};  // some lanes did not reach it
  round->lanes |= 1u << me.lane;
  if (round->lanes == me.warp->existing) {
    *round = FenceRound{where, 0, true};
    return false;
  }
  return round->was_whole;
}

}  // namespace

// ThreadSanitizer's fibers start with everything that their creator has seen, so they are created before kernel code runs.
void make_bulk_engines() {
  for (void*& engine : engines)
    if (!engine) engine = new_fiber("the tensor memory accelerator");
}

void write_shared(Cta& cta, unsigned char* to, const void* from, size_t bytes) {
  memcpy(to, from, bytes);
  memcpy(&cta.proxy_view[static_cast<size_t>(to - cta.shared)], from, bytes);
}

void update_view(Cta& cta) {
  memcpy(cta.proxy_view.data(), cta.shared, cta.shared_bytes);
  cta.is_view_late = false;
}

bool land_a_load(Cta& cta) {
  if (cta.loads.empty()) return false;
  const auto chosen = cta.loads.begin() + launch->random.below(static_cast<uint32_t>(cta.loads.size()));
  const std::unique_ptr<Transfer> transfer = std::move(*chosen);
  cta.loads.erase(chosen);
  check_phase(*transfer->barrier, transfer->phase, transfer->where);
  check_untouched(cta, *transfer);
  land(cta, *transfer);
  return true;
}

void check_stores_read(const Thread& thread) {
  for (const auto& store : thread.stores)
    if (!store->is_waited_for)
      fail(store->where, "the thread exits without bulk_wait_read or bulk_wait for this copy from shared memory");
}

void end_transfers(Cta& cta) {
  for (int i = 0; i < cta.thread_count; ++i) {
    for (auto& store : cta.threads[i]->stores) {
      if (!store->is_written && !launch->failed) write_target(cta, *store);
      acquire(store->engine);
    }
    cta.threads[i]->stores.clear();
  }
  if (cta.loads.empty() || launch->failed) return;
  launch->failed = true;
  snprintf(launch->message, sizeof launch->message, "%s: the block (%u, %u, %u) ends while this copy is pending",
           place(cta.loads[0]->where).letters, cta.index.x, cta.index.y, cta.index.z);
}

void check_tensor_map(const void* map, Location where) {
  Entry entry("prefetch_tensor_map", where);
  map_at(map, "prefetch_tensor_map", where);
}

void fence_proxy_async(Location where) {
  Entry entry("fence_proxy_async", where);
  Thread& me = self();
  Cta& cta = *me.cta;
  release(&me.store_groups);
  as_engine(me.proxy, nullptr, [&] { acquire(&me.store_groups); });
  if (awaits_other_lanes(where)) cta.is_view_late = true;
  else update_view(cta);
}

void tma_load(uint32_t destination, const void* map, uint32_t barrier, Box box, const char* name, Location where) {
  Entry entry(name, where);
  auto transfer = new_transfer(name, where, __builtin_return_address(0));
  cut_box(*transfer, map_at(map, name, where), box, destination);
  start_load(std::move(transfer), barrier);
}

void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier, Location where) {
  Entry entry("bulk_load", where);
  auto transfer = new_transfer("bulk_load", where, __builtin_return_address(0));
  cut_run(*transfer, source, destination, bytes);
  start_load(std::move(transfer), barrier);
}

void tma_store(const void* map, uint32_t source, Box box, bool adds, const char* name, Location where) {
  Entry entry(name, where);
  auto transfer = new_transfer(name, where, __builtin_return_address(0));
  transfer->adds = adds;
  for (int axis = 0; axis < box.rank; ++axis)
    if (box.start[axis] < 0) fail(where, "%s: a box that is stored starts at 0 or later; got %d", name, box.start[axis]);
  cut_box(*transfer, map_at(map, name, where), box, source);
  for (Piece& piece : transfer->pieces)
    if (!adds && piece.first < piece.last) piece.last = 16;  // whole chunks are written, as an H100 does
  start_store(std::move(transfer));
}

void bulk_store(void* destination, uint32_t source, int bytes, bool adds, const char* name, Location where) {
  Entry entry(name, where);
  auto transfer = new_transfer(name, where, __builtin_return_address(0));
  transfer->adds = adds;
  transfer->type = Type::single;
  cut_run(*transfer, destination, source, bytes);
  start_store(std::move(transfer));
}

void bulk_commit(Location where) {
  Entry entry("bulk_commit", where);
  ++self().store_groups;
}

void bulk_wait(int pending, bool only_read, Location where) {
  Entry entry(only_read ? "bulk_wait_read" : "bulk_wait", where);
  Thread& me = self();
  for (auto& store : me.stores) {
    if (store->group >= me.store_groups - pending) continue;
    if (!store->is_read) read_source(*me.cta, *store);
    if (!only_read && !store->is_written) write_target(*me.cta, *store);
    acquire(store->engine);
    store->is_waited_for = true;
  }
  std::erase_if(me.stores, [](const auto& store) { return store->is_waited_for && store->is_written; });
}

}  // namespace cuflash::sim
