// A launch from start to end: stacks of its threads, shared memory, and its blocks, one after another or concurrently.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "residents.hpp"
#include "subnormals.hpp"
#include "watchdog.hpp"

namespace cuflash::sim {

namespace {

constexpr unsigned char kCanary = 0xa5;
std::vector<Thread*> pool;   // threads, reused by later blocks and launches

size_t num_blocks(const Request& request) { return size_t{request.grid[0]} * request.grid[1] * request.grid[2]; }
size_t num_slots(const Request& request) {
  return std::min(num_blocks(request), static_cast<size_t>(request.schedule.resident_blocks));
}

// Entry function of a fiber, which begins again here when its thread's next block starts.
void run_thread() {
  enter_stack(nullptr);
  for (;;) {
    acquire(&self().cta->block_clock);
    as_engine(self().proxy, nullptr, [] { acquire(&self().cta->block_clock); });
    launch->in_kernel.store(true, std::memory_order_relaxed);
    launch->request.kernel(launch->request.arguments);
    launch->in_kernel.store(false, std::memory_order_relaxed);
    Unwatched unwatched;
    Thread& me = self();
    if (!me.copies.empty())
      fail(me.where, "the thread exits with %zu copies of cp.async that it never waited for", me.copies.size());
    check_stores_read(me);
    check_products_done(*me.warp);
    for (const Rendezvous& pending : me.warp->pending)
      if (pending.mask >> me.lane & 1)
        fail(pending.where, "the thread exits while lanes %08x of its warp wait for it in %s here", pending.arrived,
             pending.operation->name);
    release(&me.cta->block_clock);
    me.state = State::exited;
    me.warp->exited |= 1u << me.lane;
    --me.cta->alive;
    schedule(true);
  }
}

// A guard page below each stack turns an overflow into a fault.
void new_stack(Thread& thread) {
  const size_t guard = static_cast<size_t>(getpagesize());
  void* memory = mmap(nullptr, kStackBytes + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
  if (memory == MAP_FAILED) {
    perror("cuflash.sim: no memory for a thread's stack");
    abort();
  }
  mprotect(memory, guard, PROT_NONE);
  thread.stack = static_cast<char*>(memory) + guard;
}

void start_thread(Cta& cta, int linear) {
  Thread& thread = *cta.threads[linear];
  thread.index = {static_cast<unsigned>(linear), 0, 0};
  thread.linear = linear;
  thread.lane = linear % 32;
  thread.block = thread.cta = &cta;
  thread.warp = &cta.warps[linear / 32];
  thread.doing = "its first lines";
  thread.copies.clear();
  thread.stores.clear();
  thread.groups = thread.store_groups = thread.spins = 0;
  thread.awaited = nullptr;
  thread.counter = nullptr;
  if (thread.state != State::exited) {   // new, or left in the middle of a launch that failed
    unpoison(thread.stack, kStackBytes);
    // Stacks are multiples of a page apart. With equal offsets they would all occupy the same few cache sets.
    make_context(thread.context, thread.stack, kStackBytes - 64 * (linear % 61), run_thread);
  }
  thread.warp->existing |= 1u << thread.lane;
  set_ready(thread);
}

// ThreadSanitizer's fibers start with everything that their creator has seen, so they are created before kernel code runs.
void grow_pool(int count) {
  make_bulk_engines();
  while (static_cast<int>(pool.size()) < count) {
    auto* thread = new Thread;
    char name[64];
    snprintf(name, sizeof name, "CUDA thread %zu", pool.size());
    thread->fiber = new_fiber(name);
    thread->proxy = new_fiber("what asynchronous operations of a CUDA thread know");
    if (pool.size() < 32 * kMaxWarps) make_product_engines(static_cast<int>(pool.size() / 32));
    new_stack(*thread);
    pool.push_back(thread);
  }
}

// AddressSanitizer asks for the bounds of the stack that fibers return to.
void find_host_stack(Thread& host) {
#if defined(CUFLASH_SIM_ADDRESS)
  pthread_attr_t attributes;
  void* low;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &host.stack_bytes);
  pthread_attr_destroy(&attributes);
  host.stack = static_cast<char*>(low);
#else
  static_cast<void>(host);
#endif
}

void check_block_end(const Cta& cta) {
  check_warpgroups(cta);
  for (int id = 0; id < kBarriers && !launch->failed; ++id) {
    const Barrier& barrier = cta.barriers[id];
    if (!barrier.arrived) continue;
    launch->failed = true;
    snprintf(launch->message, sizeof launch->message,
             "%s: the block (%u, %u, %u) ends with %d of %d threads counted at barrier %d",
             place(barrier.where).letters, cta.index.x, cta.index.y, cta.index.z, barrier.arrived, barrier.expected, id);
  }
  for (size_t i = 0; i < kCanaryBytes && !launch->failed && !kSanitized; ++i) {
    if (cta.shared[cta.shared_bytes + i] == kCanary) continue;
    launch->failed = true;
    snprintf(launch->message, sizeof launch->message,
             "%s: block (%u, %u, %u) wrote into the byte %zu past the end of its %zu bytes of dynamic shared memory",
             place(cta.threads[0]->where).letters, cta.index.x, cta.index.y, cta.index.z, i, cta.shared_bytes);
  }
}

void start_block(Cta& cta, int slot, unsigned char* shared) {
  const Request& request = launch->request;
  cta.grid_dim = dim3(request.grid[0], request.grid[1], request.grid[2]);
  cta.block_dim = dim3(request.block);
  cta.thread_count = cta.alive = static_cast<int>(request.block);
  cta.warp_count = (cta.thread_count + 31) / 32;
  cta.running_warp = cta.warp_count - 1;   // round robin then starts with warp 0
  cta.slot = slot;
  cta.threads = pool.data() + static_cast<ptrdiff_t>(slot) * cta.thread_count;
  cta.shared = shared;
  cta.shared_bytes = request.shared_bytes;
  cta.change_points = 6;
  for (int w = 0; w < kMaxWarps; ++w)
    for (FenceRound& round : launch->fence_rounds[static_cast<size_t>(slot * kMaxWarps + w)]) round.lanes = 0;
  if (request.schedule.poison) memset(shared, 0xff, request.shared_bytes);
  if (!kSanitized) memset(shared + request.shared_bytes, kCanary, kCanaryBytes);
  cta.proxy_view.assign(shared, shared + request.shared_bytes);
  for (int w = 0; w < cta.warp_count; ++w) {
    cta.warps[w].index = w;
    cta.warps[w].priority = 1000 + launch->random.below(1000);
  }
  for (int i = 0; i < cta.thread_count; ++i) start_thread(cta, i);
  release(&cta.block_clock);
}

void end_block(Cta& cta) {
  acquire(&cta.block_clock);
  end_transfers(cta);
  check_block_end(cta);
}

// Runs the blocks one after another.
void run_blocks(unsigned char* shared) {
  const Request& request = launch->request;
  for (unsigned z = 0; z < request.grid[2] && !launch->failed; ++z)
    for (unsigned y = 0; y < request.grid[1] && !launch->failed; ++y)
      for (unsigned x = 0; x < request.grid[0] && !launch->failed; ++x) {
        auto* cta = new Cta{};
        cta->index = {x, y, z};
        start_block(*cta, 0, shared);
        launch->host.cta = cta;
        current = &launch->host;
        schedule(false);
        launch->host.cta = nullptr;
        end_block(*cta);
        delete cta;
      }
}

// Runs several blocks concurrently: whenever one has ended, the next one starts in its slot.
void run_residents(Residents& residents, unsigned char* shared, size_t room) {
  const Request& request = launch->request;
  const auto start_next = [&](size_t slot) {
    Cta*& cta = residents.ctas[slot];
    cta = nullptr;
    if (residents.num_started == residents.num_blocks) return;
    const auto number = static_cast<unsigned>(residents.num_started++);
    cta = new Cta{};
    cta->number = number;
    cta->index = {number % request.grid[0], number / request.grid[0] % request.grid[1],
                  number / request.grid[0] / request.grid[1]};
    cta->priority = 1000 + launch->random.below(1000);
    start_block(*cta, static_cast<int>(slot), shared + slot * room);
    ++residents.num_running;
  };
  current = &launch->host;
  for (size_t slot = 0; slot < residents.ctas.size(); ++slot) start_next(slot);
  // After a failure that the host detects, execution continues here.
  if (setjmp(residents.host_place) == 0)
    while (residents.num_running && !launch->failed) {
      schedule(false);
      for (size_t slot = 0; slot < residents.ctas.size() && !launch->failed; ++slot) {
        Cta* const cta = residents.ctas[slot];
        if (!cta || cta->alive) continue;
        end_block(*cta);
        --residents.num_running;
        delete cta;
        start_next(slot);
      }
    }
  for (Cta* cta : residents.ctas) delete cta;
}

void run_grid() {
  const Request& request = launch->request;
  const size_t room = (request.shared_bytes + kCanaryBytes + 1023) / 1024 * 1024, slots = num_slots(request);
  auto* shared = static_cast<unsigned char*>(aligned_alloc(1024, slots * room));
  const size_t used = (request.shared_bytes + 7) / 8 * 8;
  for (size_t slot = 0; slot < slots; ++slot) poison(shared + slot * room + used, room - used);
  if (slots == 1) {
    run_blocks(shared);
  } else {
    Residents residents(num_blocks(request));
    residents.ctas.resize(slots);
    residents.shared = shared;
    residents.shared_bytes = slots * room;
    launch->residents = &residents;
    run_residents(residents, shared, room);
    launch->residents = nullptr;
  }
  unpoison(shared, slots * room);
  free(shared);
}

}  // namespace
}  // namespace cuflash::sim

// Returns whether the launch failed, and why. The caller ensures that there is only one launch at a time.
extern "C" int cuflash_sim_launch(const cuflash::sim::Request* request, char* message, size_t room,
                                  uint64_t* fault_offsets) {
  using namespace cuflash::sim;
  auto* mine = launch = new Launch;
  mine->request = *request;
  mine->random.state = request->schedule.seed;
  mine->os_thread = pthread_self();
  mine->host.fiber = this_fiber();
  find_host_stack(mine->host);
  mine->fence_rounds.resize(num_slots(*request) * kMaxWarps);
  grow_pool(static_cast<int>(num_slots(*request) * request->block));
  {
    FaultHandlers faults;
    Watchdog watchdog(request->time_limit);
    const Subnormals of_floats(request->flushes);
    run_grid();
  }
  const bool failed = mine->failed;
  if (failed)
    for (Thread* thread : pool) thread->state = State::fresh;
  snprintf(message, room, "%s", mine->message);
  fault_offsets[0] = mine->fault_offset;
  fault_offsets[1] = mine->other_offset;
  launch = nullptr;
  current = nullptr;
  delete mine;
  return failed;
}
