// The order of accesses by different blocks: ThreadSanitizer's algorithm with one clock per block. The threads of a block
// share the clock, because sanitize="thread" checks races between them. An atomic operation orders nothing by itself: a
// fence before it makes it a release, and a fence after it makes it an acquire (PTX memory consistency model).
#include "ordering.hpp"

#include <dlfcn.h>

#include "residents.hpp"

namespace cuflash::sim {

namespace {

bool is_write(Kind kind) { return kind == Kind::write || kind == Kind::atomic_write; }
bool is_atomic(Kind kind) { return kind == Kind::atomic_read || kind == Kind::atomic_write; }
const char* word_of(Kind kind) {
  constexpr const char* words[] = {"load", "store", "atomic load", "atomic operation"};
  return words[static_cast<int>(kind)];
}

void join(BlockClock& to, const BlockClock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

// Returns the offset of an instruction in the kernel's library, from which a report finds the line, or 0 without one.
uint64_t offset_of(const Line& line) {
  Dl_info here;
  if (!line.instruction || !dladdr(line.instruction, &here)) return 0;
  return reinterpret_cast<uint64_t>(line.instruction) - reinterpret_cast<uint64_t>(here.dli_fbase) - 1;
}
Text text_of(const Line& line) { return line.instruction ? text("%s", "") : text(" at %s", place(line.where).letters); }

}  // namespace

void Ordering::synchronise(size_t block, const void* address, bool writes) {
  BlockClock& left = left_[reinterpret_cast<uintptr_t>(address)];
  join(seen_[block], left);
  if (writes) join(left, fenced_[block]);
}

void Ordering::fence(size_t block) {
  join(known_[block], seen_[block]);
  fenced_[block] = known_[block];
  ++known_[block][block];
}

void Ordering::release(size_t block, const void* counter) {
  join(left_[reinterpret_cast<uintptr_t>(counter)], known_[block]);
  ++known_[block][block];
}

void Ordering::acquire(size_t block, const void* counter) {
  join(known_[block], left_[reinterpret_cast<uintptr_t>(counter)]);
}

void Ordering::note_word(size_t block, uintptr_t word, uint8_t bytes, Kind kind, const Line& line) {
  auto& accesses = words_[word].accesses;
  const BlockClock& known = known_[block];
  // Newest first: atomic operations before this block's own atomic operations on the same bytes are ordered without a fence.
  uint8_t in_order = 0;
  for (auto place = accesses.rbegin(); place != accesses.rend(); ++place) {
    const Access& other = *place;
    if (other.block == block && is_atomic(other.kind)) in_order |= other.bytes;
    if (other.block == block || !(other.bytes & bytes) || (!is_write(other.kind) && !is_write(kind)) ||
        (is_atomic(other.kind) && (is_atomic(kind) || !(other.bytes & bytes & ~in_order))) ||
        other.time <= known[other.block])
      continue;
    launch->fault_offset = offset_of(line);
    launch->other_offset = offset_of(other.line);
    const auto& grid = launch->request.grid;
    fail(line.instruction ? self().where : line.where,
         "a race between blocks: this %s of global memory at %p%s, and the %s%s by block (%u, %u, %u), are not ordered: a "
         "fence or a release must follow the one, and a fence or an acquire must precede the other",
         word_of(kind), reinterpret_cast<void*>(word + static_cast<unsigned>(__builtin_ctz(bytes))), text_of(line).letters,
         word_of(other.kind), text_of(other.line).letters, other.block % grid[0], other.block / grid[0] % grid[1],
         other.block / grid[0] / grid[1]);
  }
  const auto is_replaced = [&](const Access& other) {
    const bool is_covered = (other.bytes & ~bytes) == 0;
    return is_covered && (other.block == block ? other.kind == kind : is_write(kind) && !is_atomic(kind));
  };
  std::erase_if(accesses, is_replaced);
  accesses.push_back({static_cast<uint32_t>(block), known[block], bytes, kind, line});
}

void Ordering::note(size_t block, const void* address, size_t bytes, Kind kind, Line line) {
  const auto first = reinterpret_cast<uintptr_t>(address), end = first + bytes;
  for (uintptr_t word = first & ~uintptr_t{7}; word < end; word += 8) {
    const unsigned from = word < first ? static_cast<unsigned>(first - word) : 0;
    const unsigned to = end - word < 8 ? static_cast<unsigned>(end - word) : 8;
    note_word(block, word, static_cast<uint8_t>((1u << to) - (1u << from)), kind, line);
  }
  if (is_atomic(kind)) synchronise(block, address, is_write(kind));
  else if (is_write(kind) && !left_.empty()) left_.erase(first);   // reading this value does not acquire
}

}  // namespace cuflash::sim
