// The simulated machine: a launch, its block, the block's warps, threads and barriers. Everything that belongs to a
// block is in its Cta, reached from the current thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "context.hpp"
#include "interface.hpp"
#include "sanitizer.hpp"
#include "schedule.hpp"

namespace cuflash::sim {

constexpr size_t kStackBytes = 256 << 10;
constexpr uint32_t kSharedBase = 1024;   // the first shared address, so that 0 is none
constexpr size_t kCanaryBytes = 1024;    // behind shared memory, to see stores past its end
constexpr int kMaxWarps = 32;
constexpr int kBarriers = 16;
constexpr int kMeetings = 8;             // of parts of one warp, at a time
constexpr int kCopyEngines = 4;          // of one thread; groups take turns
constexpr int kWarpgroup = 4;            // warps

enum class State : uint8_t { fresh, ready, blocked, exited };

struct Copy {
  unsigned char* destination;
  const void* source;
  int bytes, source_bytes;
  int group;         // how many groups the thread had committed before it
  bool landed;
  void* engine;
  void* caller;      // the kernel's line, for reports
};

struct Warp;
struct Cta;
struct Mbarrier;
struct Transfer;   // bulk.cpp
struct Products;   // wgmma.cpp

// A line of a report; what does not fit is cut off.
struct Text {
  char letters[512];
  bool operator==(const Text& other) const { return strcmp(letters, other.letters) == 0; }
};

// What whoever acquires it knows to have happened, ThreadSanitizer's way, and the part of it that asynchronous copies and
// wgmma may rely on, which read shared memory past the writes of threads: fence_proxy_async makes all a thread knows part
// of it.
struct Clock { char threads = 0, proxy = 0; };

struct Thread : Identity {
  int linear = 0;
  Warp* warp = nullptr;
  Cta* cta = nullptr;

  Context context;
  char* stack = nullptr;
  size_t stack_bytes = kStackBytes;
  void* fake_stack = nullptr;             // AddressSanitizer's
  void* fiber = nullptr;                  // ThreadSanitizer's
  void* engines[kCopyEngines] = {};
  void* proxy = nullptr;                  // a fiber that knows what is known to its asynchronous operations

  State state = State::fresh;
  const char* doing = "its first lines";  // the newest operation, for reports
  Location where;
  int spins = 0;                          // operations since it last let others run
  Thread* next_waiting = nullptr;         // at a barrier
  const Mbarrier* awaited = nullptr;
  bool persists = true;                   // in waiting for it
  const int* counter = nullptr;           // in global memory, whose change it waits for
  int seen = 0;                           // the counter's value when it looked

  std::vector<Copy> copies;               // in order of issue
  int groups = 0;                         // committed so far
  std::vector<std::unique_ptr<Transfer>> stores;   // to global memory, in order of issue
  int store_groups = 0;                   // committed so far
};

// Lanes on their way to doing one warp operation together.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0;         // mask 0: free
  const Operation* operation = nullptr;
  Location where;
  void* arguments[32];
  Clock clock;
};

struct Warp {
  int index = 0;
  uint32_t existing = 0, ready = 0, exited = 0;   // lanes, as bits
  uint64_t priority = 0;
  Rendezvous pending[kMeetings];
  std::unique_ptr<Products> products;     // made by its first wgmma
};

struct Barrier {
  struct Arrival { uint32_t lanes = 0; Location where; };
  int expected = 0, arrived = 0, phase = 0;
  Location where;                         // of the first arrival
  Thread* waiting = nullptr;
  Arrival arrivals[kMaxWarps];
  Clock clocks[2];                        // of even and odd phases
};

struct Mbarrier {
  uint32_t address = 0;
  int count = 0, pending = 0, bytes = 0;  // bytes that are announced and have not come
  unsigned phase = 0;
  unsigned awaited = 0;                   // the phase whose start somebody has waited for last
  int maker = 0;
  Cta* cta = nullptr;
  bool is_fenced = false;                 // so that copies see it
  Location where;                         // of its init
  Clock clocks[2];                        // of even and odd phases
};

// Operation that all warps of a warpgroup must carry out in the same order.
struct Deed {
  const char* format;                     // of its numbers, for reports
  long long numbers[4] = {};
  bool operator==(const Deed& other) const = default;
};
struct Step { Deed what; Location where; };
struct Warpgroup {
  std::vector<Step> steps;
  size_t done[kWarpgroup] = {};
  int registers = 0;                      // as setmaxnreg left them; 0 if it was not called
};

// Lanes of a warp on their way through a fence_proxy_async. Where all came the last time, all are taken to come again: what
// they wrote counts as fenced once the last one has come, or another warp goes on, or somebody looks.
struct FenceRound { Location where; uint32_t lanes = 0; bool was_whole = false; };

struct Cta : Block {
  int thread_count = 0, warp_count = 0, alive = 0;
  int running_warp = 0;
  int change_points = 0;                  // how many more times priorities may change
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  Thread** threads = nullptr;
  Warp warps[kMaxWarps];
  Barrier barriers[kBarriers];
  char block_clock = 0;
  Clock fence_clock;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<std::unique_ptr<Transfer>> loads;   // under way
  std::vector<unsigned char> proxy_view;  // of shared memory: what asynchronous reads see of it
  bool is_view_late = false;              // lanes of the running warp have fenced since
  Warpgroup warpgroups[kMaxWarps / kWarpgroup];
  size_t number = 0;                      // in the grid
  int slot = 0;                           // of the blocks that run together
  uint64_t priority = 0;                  // among them
};

// Laid out as sim/launch.py has it.
struct Request {
  void (*kernel)(void**);
  void** arguments;
  uint64_t shared_bytes;
  uint32_t grid[3];
  uint32_t block;
  double time_limit;   // seconds
  Schedule schedule;
};

struct Residents;   // residents.hpp

struct Launch {
  Request request;
  Random random;
  Thread host;                            // the OS thread, on its own stack
  pthread_t os_thread;
  std::vector<std::vector<FenceRound>> fence_rounds;   // of the warps of each slot
  Residents* residents = nullptr;         // where several blocks run together; otherwise null
  bool failed = false;
  std::atomic<bool> in_kernel{false};     // a signal may then leave for good: no lock of ours is held
  std::atomic<bool> expired{false};       // the time limit has passed
  char message[8192] = "";
  uint64_t fault_offset = 0;              // of the instruction that failed, in the kernel's library
  uint64_t other_offset = 0;              // of the one that it races with
};
extern Launch* launch;                    // one at a time

inline Thread& self() { return *static_cast<Thread*>(current); }
inline void acquire(Clock& clock) {
  acquire(&clock.threads);
  as_engine(self().proxy, nullptr, [&] { acquire(&clock.proxy); });
}
inline void release(Clock& clock) {
  release(&clock.threads);
  as_engine(self().proxy, nullptr, [&] { release(&clock.proxy); });
}
inline Thread& thread_of(const Cta& cta, const Warp& warp, int lane) { return *cta.threads[warp.index * 32 + lane]; }

// ---- failure.cpp ----
Text text(const char* format, ...) __attribute__((format(printf, 1, 2)));
Text place(Location where);
[[noreturn]] void fail_at(const char* file, unsigned line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
void check_time_limit(Location where);

// First thing in every operation that a kernel calls: what is under way, and that it is the runtime's work.
class Entry {
 public:
  Entry(const char* doing, Location where) {
    launch->in_kernel.store(false, std::memory_order_relaxed);
    self().doing = doing;
    self().where = where;
    if (launch->expired.load(std::memory_order_relaxed)) check_time_limit(where);
  }
  ~Entry() { launch->in_kernel.store(true, std::memory_order_relaxed); }

 private:
  Unwatched unwatched_;
};

// ---- scheduler.cpp ----
void switch_thread(Thread& from, Thread& to);
void set_ready(Thread& thread);
void schedule(bool same_warp_first);      // runs another thread; returns when this one's turn comes again
void block();                             // until another thread calls set_ready
void yield();                             // to whom the order prefers
[[noreturn]] void abandon_block();        // back to the launch; the block's threads are left where they are
int pick_warp(Cta& cta);                  // that the order prefers among those with a thread to run; -1: none
int pick_lane(uint32_t ready);
bool let_go(Cta& cta);                    // of a wait that does not persist; whether there was one
void describe_block(const Cta& cta, char*& to, const char* end);   // what its threads do, as far as there is room

// ---- residents.cpp ----
void schedule_residents(Thread& me, bool same_warp_first);
Text residency();                         // for reports: how many blocks run and how many have not started

// ---- mbarrier.cpp ----
Mbarrier& mbarrier_at(uint32_t address, const char* name, Location where);
void check_phase(const Mbarrier& barrier, unsigned phase, Location where);
void complete(Mbarrier& barrier, int bytes, Location where);
Text state_of(const Mbarrier& barrier);

// ---- bulk.cpp ----
bool land_a_load(Cta& cta);               // whether there was one
void check_stores_read(const Thread& thread);
void end_transfers(Cta& cta);             // writes what is still to be written when the block ends
void make_bulk_engines();
void write_shared(Cta& cta, unsigned char* to, const void* from, size_t bytes);   // as asynchronous copies do
void update_view(Cta& cta);               // of asynchronous reads, to what is there

// ---- wgmma.cpp ----
void check_products_done(const Warp& warp);
void check_warpgroups(const Cta& cta);
void make_product_engines(int warp);

}  // namespace cuflash::sim
