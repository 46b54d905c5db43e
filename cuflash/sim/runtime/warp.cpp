// Operations of a warp: lanes wait for each other, and the last one to arrive executes the operation for all.
#include "cta.hpp"

namespace cuflash::sim {

namespace {

// Returns the rendezvous that this lane belongs to, a new one if it is the first lane. Parts of a warp may have separate
// ones, and one part may wait for all lanes while another is in an operation; but two parts may not wait for each other.
Rendezvous& meeting(Warp& warp, const Operation& operation, uint32_t mask, Location where) {
  const uint32_t me = 1u << self().lane;
  Rendezvous* free = nullptr;
  for (Rendezvous& pending : warp.pending) {
    if (pending.mask == mask) return pending;
    if (!pending.mask) free = &pending;
    if ((pending.mask & me) && (pending.arrived & mask))
      fail(where, "the warp diverged: this lane is in %s with mask %08x here, while lanes %08x wait for it in %s at %s",
           operation.name, mask, pending.arrived, pending.operation->name, place(pending.where).letters);
  }
  if (!free) fail(where, "%s: %d other parts of this warp already wait, each for different lanes", operation.name, kMeetings);
  free->mask = mask;
  free->arrived = 0;
  free->operation = &operation;
  free->where = where;
  return *free;
}

// After an operation another warp may run, so that warps drift apart as they do on a GPU.
void maybe_yield(Warp& warp) {
  Random& random = launch->random;
  Cta& cta = *self().cta;
  switch (launch->request.schedule.order) {
    case Order::round_robin: return yield();
    case Order::first_warp:
    case Order::last_warp: return;
    case Order::random:
      if (random.one_in(4)) yield();
      return;
    case Order::priorities:
      if (cta.change_points && random.one_in(128)) {
        --cta.change_points;
        warp.priority = random.below(1000);   // lower than the initial priority of any warp
        yield();
      }
  }
}

}  // namespace

void collective(const Operation& operation, uint32_t mask, void* argument, Location where) {
  Entry entry(operation.name, where);
  Thread& me = self();
  Warp& warp = *me.warp;
  if (!(mask >> me.lane & 1)) fail(where, "%s: the calling lane is not in its mask %08x", operation.name, mask);
  mask &= warp.existing;
  if (operation.whole_warp && mask != 0xffffffffu)
    fail(where, "%s needs all 32 lanes of a warp, and this one has %d: make the block a multiple of 32 threads",
         operation.name, __builtin_popcount(warp.existing));
  if (mask & warp.exited)
    fail(where, "%s: mask %08x names lanes %08x, which have exited", operation.name, mask, mask & warp.exited);

  Rendezvous& here = meeting(warp, operation, mask, where);
  if (here.operation != &operation || here.where.line() != where.line() || here.where.column() != where.column() ||
      here.where.file_name() != where.file_name())
    fail(where, "the warp diverged: this lane is in %s here, while lanes %08x wait in %s at %s", operation.name,
         here.arrived, here.operation->name, place(here.where).letters);
  here.arguments[me.lane] = argument;
  here.arrived |= 1u << me.lane;
  if (operation.orders_memory) release(here.clock);
  if (here.arrived != mask) {
    block();
    if (operation.orders_memory) acquire(here.clock);
    return;
  }
  if (operation.execute) operation.execute(here.arguments, mask);
  if (operation.orders_memory) acquire(here.clock);
  here.mask = 0;
  for (uint32_t rest = mask & ~(1u << me.lane); rest; rest &= rest - 1)
    set_ready(thread_of(*me.cta, warp, __builtin_ctz(rest)));
  maybe_yield(warp);
}

void execute_shuffle(void* const* arguments, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    auto& lane = *static_cast<ShuffleLane*>(arguments[__builtin_ctz(rest)]);
    if (!(mask >> lane.source & 1))
      fail(self().where, "%s: lane %d reads lane %d, which does not take part (mask %08x)", self().doing,
           __builtin_ctz(rest), lane.source, mask);
    lane.out = static_cast<ShuffleLane*>(arguments[lane.source])->in;
  }
}

void execute_gather(void* const* arguments, uint32_t mask) {
  uint32_t values[32] = {};
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    values[__builtin_ctz(rest)] = static_cast<GatherLane*>(arguments[__builtin_ctz(rest)])->value;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    auto& lane = *static_cast<GatherLane*>(arguments[__builtin_ctz(rest)]);
    lane.participants = mask;
    memcpy(lane.values, values, sizeof values);
  }
}

}  // namespace cuflash::sim
