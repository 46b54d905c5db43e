// Barriers of a block; __syncthreads is number 0. Each thread is counted, which is stricter than a GPU: it is an error if
// some lanes of a warp miss a barrier, or if threads exit that the barrier expects.
#include "cta.hpp"

namespace cuflash::sim {

int block_threads() { return self().cta->thread_count; }

void fence() {
  acquire(self().cta->fence_clock);
  release(self().cta->fence_clock);
}

namespace {

void check_arrival(const Barrier& barrier, int id, int threads, Location where) {
  const Thread& me = self();
  const Barrier::Arrival& warp = barrier.arrivals[me.warp->index];
  if (barrier.arrived && barrier.expected != threads)
    fail(where, "barrier %d is for %d threads here, and for %d at %s, where %d have arrived", id, threads,
         barrier.expected, place(barrier.where).letters, barrier.arrived);
  if (warp.lanes >> me.lane & 1)
    fail(where, "this thread arrives at barrier %d a second time (the first at %s) before the others have arrived", id,
         place(warp.where).letters);
  if (warp.lanes && (warp.where.line() != where.line() || warp.where.column() != where.column()))
    fail(where, "the warp diverged: this lane reaches barrier %d here, lanes %08x reached it at %s", id, warp.lanes,
         place(warp.where).letters);
}

}  // namespace

void barrier(int id, int threads, bool wait, Location where) {
  Thread& me = self();
  Entry entry(id == 0 ? "__syncthreads" : wait ? "bar_sync" : "bar_arrive", where);
  if (id < 0 || id >= kBarriers) fail(where, "a barrier's id is from 0 to 15; got %d", id);
  if (threads < 1 || threads > me.cta->thread_count || (threads % 32 && threads != me.cta->thread_count))
    fail(where, "barrier %d: the count of threads is a multiple of 32, at most the block's %d; got %d", id,
         me.cta->thread_count, threads);
  Barrier& barrier = me.cta->barriers[id];
  check_arrival(barrier, id, threads, where);
  if (!barrier.arrived) {
    barrier.expected = threads;
    barrier.where = where;
  }
  barrier.arrivals[me.warp->index].lanes |= 1u << me.lane;
  barrier.arrivals[me.warp->index].where = where;
  Clock& clock = barrier.clocks[barrier.phase & 1];
  release(clock);
  if (++barrier.arrived < barrier.expected) {
    if (!wait) return yield();
    me.next_waiting = barrier.waiting;
    barrier.waiting = &me;
    block();
    acquire(clock);
    return;
  }
  barrier.arrived = 0;
  ++barrier.phase;
  for (Barrier::Arrival& arrival : barrier.arrivals) arrival.lanes = 0;
  for (Thread* thread = barrier.waiting; thread; thread = thread->next_waiting) set_ready(*thread);
  barrier.waiting = nullptr;
  if (wait) acquire(clock);
  yield();
}

}  // namespace cuflash::sim
