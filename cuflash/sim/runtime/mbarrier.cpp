// Barriers in shared memory. Their 8 bytes hold a mark that reveals stores to them; their state is in Mbarrier.
#include "memory.hpp"

namespace cuflash::sim {

namespace {

constexpr uint64_t kMark = 0x6d62617272696572;
constexpr int kMostPending = (1 << 20) - 1;

// Reports an operation's access to the barrier's bytes to the sanitizer: the init as a write, and all other operations,
// which are atomic and can race only with the init, as reads.
void touch(uint32_t address, bool is_init, const char* name, Location where, void* caller) {
  Frame frame(caller);
  unsigned char* word = shared_bytes(address, 8, 8, name, where);
  if (is_init) kernel_writes(word, 8);
  else kernel_reads(word, 8);
}

void end_phase_if_complete(Mbarrier& barrier, Location where) {
  if (barrier.pending) return;
  if (barrier.bytes < 0)
    fail(where, "%d bytes arrived at the mbarrier of %s that no arrival had announced: too few were expected", -barrier.bytes,
         place(barrier.where).letters);
  if (barrier.bytes) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  Cta& cta = *barrier.cta;
  for (int i = 0; i < cta.thread_count; ++i) {
    Thread& thread = *cta.threads[i];
    if (thread.awaited != &barrier) continue;
    thread.awaited = nullptr;
    barrier.awaited = barrier.phase;
    set_ready(thread);
  }
}

}  // namespace

Mbarrier& mbarrier_at(uint32_t address, const char* name, Location where) {
  unsigned char* word = shared_bytes(address, 8, 8, name, where);
  Cta& cta = *self().cta;
  const auto found = cta.mbarriers.find(address);
  if (found == cta.mbarriers.end())
    fail(where, "%s: there is no barrier at shared offset %u", name, address - kSharedBase);
  if (memcmp(word, &kMark, 8) != 0)
    fail(where, "%s: the barrier at shared offset %u, made at %s, was overwritten", name, address - kSharedBase,
         place(found->second.where).letters);
  return found->second;
}

Text state_of(const Mbarrier& barrier) {
  return text(" (the barrier at shared offset %u is in a phase of parity %u, which %d of %d arrivals and %d bytes are "
              "missing from)",
              barrier.address - kSharedBase, barrier.phase & 1, barrier.pending, barrier.count, barrier.bytes);
}

void check_phase(const Mbarrier& barrier, unsigned phase, Location where) {
  if (barrier.phase != phase)
    fail(where, "this copy completes after the end of the mbarrier's phase in which it was issued: too few bytes were "
         "expected");
}

void complete(Mbarrier& barrier, int bytes, Location where) {
  barrier.bytes -= bytes;
  end_phase_if_complete(barrier, where);
}

void mbarrier_init(uint32_t address, int count, Location where) {
  touch(address, true, "mbarrier_init", where, __builtin_return_address(0));
  Entry entry("mbarrier_init", where);
  Cta& cta = *self().cta;
  if (count < 1 || count > kMostPending)
    fail(where, "mbarrier_init: the count of arrivals is from 1 to %d; got %d", kMostPending, count);
  if (cta.mbarriers.count(address))
    fail(where, "mbarrier_init: there is a barrier at shared offset %u already, made at %s", address - kSharedBase,
         place(cta.mbarriers[address].where).letters);
  Mbarrier& barrier = cta.mbarriers[address];
  barrier.address = address;
  barrier.count = barrier.pending = count;
  barrier.where = where;
  barrier.maker = self().linear;
  barrier.cta = &cta;
  memcpy(shared_bytes(address, 8, 8, "mbarrier_init", where), &kMark, 8);
}

void fence_mbarrier_init(Location where) {
  Entry entry("mbarrier_init_fence", where);
  for (auto& [address, barrier] : self().cta->mbarriers)
    if (barrier.maker == self().linear) barrier.is_fenced = true;
}

void mbarrier_arrive(uint32_t address, int bytes, const char* name, Location where) {
  touch(address, false, name, where, __builtin_return_address(0));
  Entry entry(name, where);
  Mbarrier& barrier = mbarrier_at(address, name, where);
  if (bytes < 0 || bytes > kMostPending || barrier.bytes + bytes > kMostPending)
    fail(where, "%s: a phase brings from 0 to %d bytes; got %d in addition to %d", name, kMostPending, bytes, barrier.bytes);
  if (!barrier.pending)
    fail(where, "%s: all %d arrivals of this phase have already happened%s", name, barrier.count, state_of(barrier).letters);
  if (barrier.awaited != barrier.phase)
    fail(where, "%s: no thread waited for the end of the previous phase, so that its arrivals ordered nothing%s", name,
         state_of(barrier).letters);
  release(barrier.clocks[barrier.phase & 1]);
  barrier.bytes += bytes;
  --barrier.pending;
  end_phase_if_complete(barrier, where);
  yield();
}

bool mbarrier_wait(uint32_t address, int parity, bool persists, const char* name, Location where) {
  touch(address, false, name, where, __builtin_return_address(0));
  Entry entry(name, where);
  Thread& me = self();
  Mbarrier& barrier = mbarrier_at(address, name, where);
  if (parity != 0 && parity != 1) fail(where, "%s: a parity is 0 or 1; got %d", name, parity);
  if (launch->request.schedule.order == Order::random && launch->random.one_in(4)) yield();
  if (static_cast<int>(barrier.phase & 1) == parity) {
    if (!persists && launch->request.schedule.order == Order::random && launch->random.one_in(2)) return false;
    me.awaited = &barrier;
    me.persists = persists;
    block();
    if (me.awaited) {   // the wait ended without the barrier's phase
      me.awaited = nullptr;
      return false;
    }
  }
  barrier.awaited = barrier.phase;
  acquire(barrier.clocks[parity]);
  return true;
}

}  // namespace cuflash::sim
