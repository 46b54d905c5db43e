// The order of accesses to global memory by different blocks, from fences, releases and atomic operations.
#pragma once

#include <unordered_map>
#include <vector>

#include "interface.hpp"

namespace cuflash::sim {

enum class Kind : uint8_t { read, write, atomic_read, atomic_write };

// The source line of an access: of an operation, or of an instruction of the kernel.
struct Line { const void* instruction = nullptr; Location where; };

// For each block, how many of its releases another block has seen. The time of a block's own accesses is its number of
// releases so far, plus one.
using BlockClock = std::vector<uint32_t>;

class Ordering {
 public:
  explicit Ordering(size_t num_blocks) : known_(num_blocks), seen_(num_blocks), fenced_(num_blocks) {
    for (size_t i = 0; i < num_blocks; ++i) known_[i].assign(num_blocks, 0), known_[i][i] = 1;
  }
  // Fails if another block's access to one of these bytes is not ordered with this access.
  void note(size_t block, const void* address, size_t bytes, Kind kind, Line line);
  void fence(size_t block);
  void release(size_t block, const void* counter);
  void acquire(size_t block, const void* counter);

 private:
  struct Access { uint32_t block, time; uint8_t bytes; Kind kind; Line line; };
  struct Word { std::vector<Access> accesses; };
  void synchronise(size_t block, const void* address, bool writes);
  void note_word(size_t block, uintptr_t word, uint8_t bytes, Kind kind, const Line& line);

  std::vector<BlockClock> known_, seen_, fenced_;   // seen: by atomic operations; known after a fence
  std::unordered_map<uintptr_t, BlockClock> left_;  // clocks at counters, for blocks that acquire these
  std::unordered_map<uintptr_t, Word> words_;
};

}  // namespace cuflash::sim
