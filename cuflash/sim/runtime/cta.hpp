// The simulated machine: a launch, its block, the block's warps, threads and barriers. Everything that belongs to a
// block is in its Cta, reached from the current thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <string>
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

  State state = State::fresh;
  const char* doing = "its first lines";  // the newest operation, for reports
  Location where;
  int spins = 0;                          // operations since it last let others run
  Thread* next_waiting = nullptr;         // at a barrier

  std::vector<Copy> copies;               // in order of issue
  int groups = 0;                         // committed so far
};

// Lanes on their way to doing one warp operation together.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0;         // mask 0: free
  const Operation* operation = nullptr;
  Location where;
  void* arguments[32];
};

struct Warp {
  int index = 0;
  uint32_t existing = 0, ready = 0, exited = 0;   // lanes, as bits
  uint64_t priority = 0;
  Rendezvous pending[kMeetings];
};

struct Barrier {
  struct Arrival { uint32_t lanes = 0; Location where; };
  int expected = 0, arrived = 0, phase = 0;
  Location where;                         // of the first arrival
  Thread* waiting = nullptr;
  Arrival arrivals[kMaxWarps];
  char clocks[2] = {};                    // of even and odd phases
};

struct Cta : Block {
  int thread_count = 0, warp_count = 0, alive = 0;
  int running_warp = 0;
  int change_points = 0;                  // how many more times priorities may change
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  Thread** threads = nullptr;
  Warp warps[kMaxWarps];
  Barrier barriers[kBarriers];
  char block_clock = 0, fence_clock = 0;
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

struct Launch {
  Request request;
  Random random;
  Thread host;                            // the OS thread, on its own stack
  pthread_t os_thread;
  bool failed = false;
  std::atomic<bool> in_kernel{false};     // a signal may then leave for good: no lock of ours is held
  std::atomic<bool> expired{false};       // the time limit has passed
  char message[8192] = "";
  uint64_t fault_offset = 0;              // of the instruction that failed, in the kernel's library
};
extern Launch* launch;                    // one at a time

inline Thread& self() { return *static_cast<Thread*>(current); }
inline Thread& thread_of(Cta& cta, const Warp& warp, int lane) { return *cta.threads[warp.index * 32 + lane]; }

// ---- failure.cpp ----
std::string place(Location where);
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

}  // namespace cuflash::sim
