// The simulated machine: a launch, its blocks, and the warps, threads and barriers of a block. The state of a block is
// in its Cta, to which each of its threads has a pointer.
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
constexpr uint32_t kSharedBase = 1024;   // the first shared address, so that 0 is invalid
constexpr size_t kCanaryBytes = 1024;    // bytes after shared memory that reveal stores past its end
constexpr int kMaxWarps = 32;
constexpr int kBarriers = 16;
constexpr int kMeetings = 8;             // how many parts of a warp may be in different operations at a time
constexpr int kCopyEngines = 4;          // engines of one thread, which its groups use in rotation
constexpr int kWarpgroup = 4;            // warps

enum class State : uint8_t { fresh, ready, blocked, exited };

struct Copy {
  unsigned char* destination;
  const void* source;
  int bytes, source_bytes;
  int group;         // number of groups that the thread had committed before it
  bool landed;
  void* engine;
  void* caller;      // the kernel's line, for reports
};

struct Warp;
struct Cta;
struct Mbarrier;
struct Transfer;   // bulk.cpp
struct Products;   // wgmma.cpp

// A line of a report, truncated if it does not fit.
struct Text {
  char letters[512];
  bool operator==(const Text& other) const { return strcmp(letters, other.letters) == 0; }
};

// Two addresses that identify vector clocks of ThreadSanitizer. A thread that acquires `threads` sees all writes that
// were released to it. Asynchronous copies and wgmma do not wait for writes of threads: they see only writes that were
// released to `proxy`. After fence_proxy_async a thread releases to `proxy` all writes that it has seen.
struct Clock { char threads = 0, proxy = 0; };

struct Thread : Identity {
  int linear = 0;
  Warp* warp = nullptr;
  Cta* cta = nullptr;

  Context context;
  char* stack = nullptr;
  size_t stack_bytes = kStackBytes;
  void* fake_stack = nullptr;             // AddressSanitizer's stack
  void* fiber = nullptr;                  // ThreadSanitizer's fiber
  void* engines[kCopyEngines] = {};
  void* proxy = nullptr;                  // a fiber that has seen the writes visible to asynchronous operations

  State state = State::fresh;
  const char* doing = "its first lines";  // the newest operation, for reports
  Location where;
  int spins = 0;                          // operations since the thread last yielded
  Thread* next_waiting = nullptr;         // the next thread that waits at the barrier
  const Mbarrier* awaited = nullptr;
  bool persists = true;                   // true if the wait lasts until the barrier's phase ends
  const int* counter = nullptr;           // the counter in global memory whose change it waits for
  int seen = 0;                           // the counter's value when the thread last read it

  std::vector<Copy> copies;               // in order of issue
  int groups = 0;                         // number of groups committed so far
  std::vector<std::unique_ptr<Transfer>> stores;   // stores to global memory, in order of issue
  int store_groups = 0;                   // number of groups committed so far
};

// Lanes that execute one warp operation together; not all of them have arrived yet.
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
  Location where;                         // place of the first arrival
  Thread* waiting = nullptr;
  Arrival arrivals[kMaxWarps];
  Clock clocks[2];                        // clocks of even and odd phases
};

struct Mbarrier {
  uint32_t address = 0;
  int count = 0, pending = 0, bytes = 0;  // bytes: announced bytes that have not arrived
  unsigned phase = 0;
  unsigned awaited = 0;                   // the last phase whose start a thread has waited for
  int maker = 0;
  Cta* cta = nullptr;
  bool is_fenced = false;                 // true if the barrier is visible to copies
  Location where;                         // place of its init
  Clock clocks[2];                        // clocks of even and odd phases
};

// An operation that all warps of a warpgroup must execute in the same order.
struct Deed {
  const char* format;                     // format of its numbers in reports
  long long numbers[4] = {};
  bool operator==(const Deed& other) const = default;
};
struct Step { Deed what; Location where; };
struct Warpgroup {
  std::vector<Step> steps;
  size_t done[kWarpgroup] = {};
  int registers = 0;                      // set by setmaxnreg; 0 if it was not called
};

// Lanes of a warp that have reached a fence_proxy_async. If all lanes reached it the last time, all are expected again:
// their writes count as fenced once the last lane has arrived, another warp runs, or the memory is read.
struct FenceRound { Location where; uint32_t lanes = 0; bool was_whole = false; };

struct Cta : Block {
  int thread_count = 0, warp_count = 0, alive = 0;
  int running_warp = 0;
  int change_points = 0;                  // number of changes of priorities that are left
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  Thread** threads = nullptr;
  Warp warps[kMaxWarps];
  Barrier barriers[kBarriers];
  char block_clock = 0;
  Clock fence_clock;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<std::unique_ptr<Transfer>> loads;   // pending copies
  std::vector<unsigned char> proxy_view;  // shared memory as asynchronous reads see it
  bool is_view_late = false;              // true if lanes of the running warp have fenced since the last update
  Warpgroup warpgroups[kMaxWarps / kWarpgroup];
  size_t number = 0;                      // number of the block in the grid
  int slot = 0;                           // slot among the blocks that run concurrently
  uint64_t priority = 0;                  // priority among them
};

// The request for a launch; sim/launch.py has the same layout.
struct Request {
  void (*kernel)(void**);
  void** arguments;
  uint64_t shared_bytes;
  uint32_t grid[3];
  uint32_t block;
  double time_limit;   // seconds
  Schedule schedule;
  int32_t flushes;
};

struct Residents;   // residents.hpp

struct Launch {
  Request request;
  Random random;
  Thread host;                            // the OS thread, on its own stack
  pthread_t os_thread;
  std::vector<std::vector<FenceRound>> fence_rounds;   // by slot, then by warp
  Residents* residents = nullptr;         // set if several blocks run concurrently
  bool failed = false;
  std::atomic<bool> in_kernel{false};     // true if no lock is held, so that a signal may abandon the kernel
  std::atomic<bool> expired{false};       // true if the time limit has passed
  char message[8192] = "";
  uint64_t fault_offset = 0;              // offset, in the kernel's library, of the instruction that failed
  uint64_t other_offset = 0;              // offset of the instruction that it races with
};
extern Launch* launch;                    // the one launch that runs

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

// Every operation that a kernel calls starts with an Entry, which records the operation, and that code of the runtime
// is running.
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
void block();                             // waits until another thread calls set_ready
void yield();                             // runs the thread that the order prefers
[[noreturn]] void abandon_block();        // returns to the launch without finishing the block's threads
int pick_warp(Cta& cta);                  // the warp that the order prefers among those with a thread to run, or -1
int pick_lane(uint32_t ready);
bool let_go(Cta& cta);                    // ends a wait that does not persist; returns whether there was one
void describe_block(const Cta& cta, char*& to, const char* end);   // truncates to the buffer

// ---- residents.cpp ----
void schedule_residents(Thread& me, bool same_warp_first);
Text residency();                         // for reports: how many blocks run and how many have not started

// ---- mbarrier.cpp ----
Mbarrier& mbarrier_at(uint32_t address, const char* name, Location where);
void check_phase(const Mbarrier& barrier, unsigned phase, Location where);
void complete(Mbarrier& barrier, int bytes, Location where);
Text state_of(const Mbarrier& barrier);

// ---- bulk.cpp ----
bool land_a_load(Cta& cta);               // returns whether there was one
void check_stores_read(const Thread& thread);
void end_transfers(Cta& cta);             // completes the pending stores when the block ends
void make_bulk_engines();
void write_shared(Cta& cta, unsigned char* to, const void* from, size_t bytes);   // writes as asynchronous copies do
void update_view(Cta& cta);               // makes the current content of shared memory visible to asynchronous reads

// ---- wgmma.cpp ----
void check_products_done(const Warp& warp);
void check_warpgroups(const Cta& cta);
void make_product_engines(int warp);

}  // namespace cuflash::sim
