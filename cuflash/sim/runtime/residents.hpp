// Blocks of a grid that run concurrently, and the order of their accesses to global memory.
#pragma once

#include <csetjmp>

#include "cta.hpp"
#include "ordering.hpp"

namespace cuflash::sim {

struct Residents {
  explicit Residents(size_t blocks) : num_blocks(blocks), ordering(blocks) {}

  std::vector<Cta*> ctas;                 // by slot; null if no further block starts there
  size_t num_blocks, num_started = 0, num_running = 0;
  unsigned char* shared = nullptr;        // memory of all slots
  size_t shared_bytes = 0;
  std::vector<Thread*> counter_waiters;
  Clock fence_clock;                      // clock of __threadfence
  jmp_buf host_place;                     // where the host continues after a failure that it has detected

  // State of launches whose kernels report their accesses.
  bool are_accesses_reported = false;
  int accesses = 0;                       // accesses since another thread ran
  Ordering ordering;
};

[[noreturn]] void abandon_from_host();
bool run_other_block(Thread& me);         // runs another block, if one has a thread that can run

// ---- accesses.cpp ----
// Checks an access to global memory by a block, or on its behalf, for races before it happens.
void note_access(const Cta& cta, const void* address, size_t bytes, Kind kind, Line line);

}  // namespace cuflash::sim
