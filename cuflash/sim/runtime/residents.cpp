// Concurrent blocks: the choice of the block that runs, waits of one block for another, and deadlocks between blocks.
#include <cstdio>

#include "residents.hpp"

namespace cuflash::sim {

namespace {

constexpr uint32_t kTurn = 8;   // mean number of steps before another block runs

bool can_run(const Cta* cta) {
  for (int w = 0; cta && w < cta->warp_count; ++w)
    if (cta->warps[w].ready) return true;
  return false;
}

Cta* first_from(size_t start, bool is_backward = false) {
  const auto& ctas = launch->residents->ctas;
  for (size_t i = 0; i < ctas.size(); ++i) {
    Cta* const cta = ctas[(is_backward ? start + ctas.size() - i : start + i) % ctas.size()];
    if (can_run(cta)) return cta;
  }
  return nullptr;
}

// Returns the block that the order prefers among those with a thread to run, or null if there is none.
Cta* pick_block(const Cta* own) {
  const auto& ctas = launch->residents->ctas;
  Random& random = launch->random;
  switch (launch->request.schedule.order) {
    case Order::round_robin: return first_from(own ? static_cast<size_t>(own->slot) + 1 : 0);
    case Order::first_warp: return first_from(0);
    case Order::last_warp: return first_from(ctas.size() - 1, true);
    case Order::random: return first_from(random.below(static_cast<uint32_t>(ctas.size())));
    case Order::priorities: break;
  }
  Cta* best = nullptr;
  for (Cta* cta : ctas)
    if (can_run(cta) && (!best || cta->priority > best->priority)) best = cta;
  if (best && random.one_in(256)) best->priority = random.below(1000);   // lower than the initial priority of any block
  return best;
}

bool stays(const Cta& own, bool same_warp_first) {
  if (same_warp_first && own.warps[own.running_warp].ready) return true;
  const Order order = launch->request.schedule.order;
  return (order == Order::round_robin || order == Order::random) && can_run(&own) && !launch->random.one_in(kTurn);
}

// Wakes the threads whose counter has changed, so that they read it again.
void wake_waiters() {
  std::erase_if(launch->residents->counter_waiters, [](Thread* thread) {
    if (__atomic_load_n(thread->counter, __ATOMIC_RELAXED) == thread->seen) return false;
    thread->counter = nullptr;
    set_ready(*thread);
    return true;
  });
}

// Makes progress without a thread: completes a copy, or ends a wait that does not persist. Returns false if it cannot.
bool let_something_happen() {
  for (Cta* cta : launch->residents->ctas) {
    if (!cta) continue;
    if (land_a_load(*cta) || let_go(*cta)) return true;
  }
  return false;
}

[[noreturn]] void report_deadlock_of_blocks() {
  char lines[sizeof launch->message] = "";
  char* to = lines;
  Location where = self().where;
  for (const Cta* cta : launch->residents->ctas) {
    if (!cta) continue;
    const auto room = static_cast<size_t>(lines + sizeof lines - to);
    const int length = snprintf(to, room, "\n  block (%u, %u, %u):", cta->index.x, cta->index.y, cta->index.z);
    to += length < static_cast<int>(room) ? length : static_cast<int>(room) - 1;
    describe_block(*cta, to, lines + sizeof lines);
    for (int i = 0; i < cta->thread_count; ++i)
      if (cta->threads[i]->state == State::blocked) where = cta->threads[i]->where;
  }
  fail(where, "deadlock of blocks: no thread can run; each of these waits for a thread that never arrives%s%s",
       residency().letters, lines);
}

void run(Thread& me, Cta& cta, int warp) {
  if (Cta* own = me.cta; own && (own != &cta || warp != own->running_warp) && own->is_view_late) update_view(*own);
  launch->residents->accesses = 0;
  cta.running_warp = warp;
  const int lane = pick_lane(cta.warps[warp].ready);
  cta.warps[warp].ready &= ~(1u << lane);
  switch_thread(me, thread_of(cta, cta.warps[warp], lane));
}

}  // namespace

Text residency() {
  const Residents& residents = *launch->residents;
  const size_t waiting = residents.num_blocks - residents.num_started;
  if (!waiting) return text("; all %zu blocks of the grid have started", residents.num_blocks);
  return text("; %zu blocks run concurrently, and %zu further blocks of the grid cannot start before one of them ends: blocks "
              "may wait only for blocks that have certainly started", residents.num_running, waiting);
}

void abandon_from_host() { longjmp(launch->residents->host_place, 1); }

void schedule_residents(Thread& me, bool same_warp_first) {
  Cta* const own = me.cta;
  if (own && own->alive == 0) return switch_thread(me, launch->host);
  if (own) check_time_limit(me.where);
  wake_waiters();
  if (own && launch->request.schedule.copies == Copies::random && !own->loads.empty() && launch->random.one_in(32))
    land_a_load(*own);
  if (own && stays(*own, same_warp_first)) {
    const bool is_same = same_warp_first && own->warps[own->running_warp].ready;
    return run(me, *own, is_same ? own->running_warp : pick_warp(*own));
  }
  Cta* next = pick_block(own);
  for (; !next; next = pick_block(own)) {
    if (let_something_happen()) continue;
    report_deadlock_of_blocks();
  }
  run(me, *next, pick_warp(*next));
}

bool run_other_block(Thread& me) {
  Cta* const other = first_from(static_cast<size_t>(me.cta->slot) + 1);
  if (!other || other == me.cta) return false;
  wake_waiters();
  int warp = other->running_warp;
  do warp = (warp + 1) % other->warp_count;
  while (!other->warps[warp].ready);
  run(me, *other, warp);
  return true;
}

bool are_blocks_together() { return launch->residents != nullptr; }

void wait_for_change(const int* counter, int seen, Location where) {
  Entry entry("wait_for_counter", where);
  Thread& me = self();
  me.counter = counter;
  me.seen = seen;
  launch->residents->counter_waiters.push_back(&me);
  block();
}

void fence_device() {
  fence();
  if (!launch->residents) return;
  acquire(launch->residents->fence_clock);
  release(launch->residents->fence_clock);
  launch->residents->ordering.fence(self().cta->number);
}

void release_counter(int* counter) {
  release(counter);
  if (launch->residents) launch->residents->ordering.release(self().cta->number, counter);
}

void acquire_counter(const int* counter) {
  acquire(const_cast<int*>(counter));
  if (launch->residents) launch->residents->ordering.acquire(self().cta->number, counter);
}

}  // namespace cuflash::sim
