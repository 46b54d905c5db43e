// The order in which threads run. Only operations switch threads: a fiber runs until it blocks or yields.
#include <cstdio>

#include "residents.hpp"

namespace cuflash::sim {

Launch* launch = nullptr;
Identity* current = nullptr;

void switch_thread(Thread& from, Thread& to) {
  if (&from == &to) return;
  from.spins = 0;
  leave_stack(&from.fake_stack, to.stack, to.stack_bytes);
  before_switch_to_fiber(to.fiber);
  current = &to;
  switch_context(from.context, to.context);
  enter_stack(from.fake_stack);
}

void abandon_block() {
  if (&self() == &launch->host) abandon_from_host();
  switch_thread(self(), launch->host);
  __builtin_unreachable();
}

void set_ready(Thread& thread) {
  thread.state = State::ready;
  thread.warp->ready |= 1u << thread.lane;
}

int pick_warp(Cta& cta) {
  const auto first_from = [&](int start, int step) {
    for (int i = 0, w = start; i < cta.warp_count; ++i, w = (w + step + cta.warp_count) % cta.warp_count)
      if (cta.warps[w].ready) return w;
    return -1;
  };
  switch (launch->request.schedule.order) {
    case Order::round_robin: return first_from((cta.running_warp + 1) % cta.warp_count, 1);
    case Order::first_warp: return first_from(0, 1);
    case Order::last_warp: return first_from(cta.warp_count - 1, -1);
    case Order::random: return first_from(static_cast<int>(launch->random.below(cta.warp_count)), 1);
    case Order::priorities: break;
  }
  int best = -1;
  for (int w = 0; w < cta.warp_count; ++w)
    if (cta.warps[w].ready && (best < 0 || cta.warps[w].priority > cta.warps[best].priority)) best = w;
  return best;
}

int pick_lane(uint32_t ready) {
  if (launch->request.schedule.shuffle_lanes)
    for (uint32_t skip = launch->random.below(static_cast<uint32_t>(__builtin_popcount(ready))); skip; --skip)
      ready &= ready - 1;
  return __builtin_ctz(ready);
}

namespace {

// Describes a thread's state, for example "waits in __syncthreads at forward.cu:12".
Text state_of(const Thread& thread) {
  if (thread.state == State::exited) return text("exited");
  return text("waits in %s at %s%s", thread.doing, place(thread.where).letters,
              thread.awaited ? state_of(*thread.awaited).letters : "");
}

// Writes one line for each group of lanes in the same state, truncated to the buffer.
void describe(const Cta& cta, const Warp& warp, char*& to, const char* end) {
  for (int lane = 0; lane < 32 && warp.existing >> lane & 1;) {
    const int first = lane;
    const Text state = state_of(thread_of(cta, warp, first));
    do ++lane;
    while (lane < 32 && warp.existing >> lane & 1 && state == state_of(thread_of(cta, warp, lane)));
    const auto room = static_cast<size_t>(end - to);
    const int length = snprintf(to, room, "\n  warp %d lanes %d-%d: %s", warp.index, first, lane - 1, state.letters);
    to += length < static_cast<int>(room) ? length : static_cast<int>(room) - 1;
  }
}

}  // namespace

void describe_block(const Cta& cta, char*& to, const char* end) {
  for (int w = 0; w < cta.warp_count; ++w) describe(cta, cta.warps[w], to, end);
}

namespace {

[[noreturn]] void report_deadlock(Cta& cta) {
  char lines[sizeof launch->message] = "";
  char* to = lines;
  describe_block(cta, to, lines + sizeof lines);
  // The report names a thread that waits, because the current thread may have exited.
  for (int i = 0; i < cta.thread_count; ++i)
    if (cta.threads[i]->state == State::blocked)
      fail(cta.threads[i]->where, "deadlock: no thread can run; each of these waits for a thread that never arrives%s", lines);
  __builtin_unreachable();
}

}  // namespace

// Ends a wait with a time limit when nothing else can happen.
bool let_go(Cta& cta) {
  for (int i = 0; i < cta.thread_count; ++i) {
    Thread& thread = *cta.threads[i];
    if (!thread.awaited || thread.persists) continue;
    set_ready(thread);
    return true;
  }
  return false;
}

void schedule(bool same_warp_first) {
  Thread& me = self();
  if (launch->residents) return schedule_residents(me, same_warp_first);
  Cta& cta = *me.cta;
  if (cta.alive == 0) {
    switch_thread(me, launch->host);
    return;
  }
  check_time_limit(me.where);
  if (launch->request.schedule.copies == Copies::random && !cta.loads.empty() && launch->random.one_in(32))
    land_a_load(cta);
  int warp = cta.running_warp;
  if (!same_warp_first || !cta.warps[warp].ready) warp = pick_warp(cta);
  while (warp < 0) {
    if (!land_a_load(cta) && !let_go(cta)) report_deadlock(cta);
    warp = pick_warp(cta);
  }
  if (warp != cta.running_warp && cta.is_view_late) update_view(cta);
  cta.running_warp = warp;
  const int lane = pick_lane(cta.warps[warp].ready);
  cta.warps[warp].ready &= ~(1u << lane);
  switch_thread(me, thread_of(cta, cta.warps[warp], lane));
}

void block() {
  self().state = State::blocked;
  schedule(true);
}

void yield() {
  set_ready(self());
  schedule(false);
}

// Except with round robin, a spinning thread would starve the thread that it waits for, so a switch is forced at intervals.
void spin(Location where) {
  Thread& me = self();
  const bool insist = ++me.spins >= 64;
  if (!insist && !(launch->request.schedule.order == Order::random && launch->random.one_in(4))) return;
  Entry entry("a spin", where);
  Cta& cta = *me.cta;
  if (insist) land_a_load(cta);
  set_ready(me);
  me.spins = 0;
  if (insist && launch->residents && launch->random.one_in(2) && run_other_block(me)) return;
  for (int i = 1; insist && i <= cta.warp_count; ++i) {
    const int warp = (me.warp->index + i) % cta.warp_count;
    const uint32_t ready = cta.warps[warp].ready & ~(warp == me.warp->index ? 1u << me.lane : 0u);
    if (!ready) continue;
    // The next lane of the same warp is preferred, so that two spinning lanes cannot alternate forever.
    const uint32_t later = warp == me.warp->index ? ready & ~((2u << me.lane) - 1) : ready;
    const int lane = __builtin_ctz(later ? later : ready);
    if (warp != cta.running_warp && cta.is_view_late) update_view(cta);
    cta.running_warp = warp;
    cta.warps[warp].ready &= ~(1u << lane);
    switch_thread(me, thread_of(cta, cta.warps[warp], lane));
    return;
  }
  schedule(false);
}

}  // namespace cuflash::sim
