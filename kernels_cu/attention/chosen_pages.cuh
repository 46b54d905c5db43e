#pragma once
#include <attention/decode_work.cuh>
#include <attention/feature_argument.cuh>
#include <attention/integers.cuh>
#include <tile/bit_set.cuh>

// The blocks of a cached sequence that each new token attends. The block numbers that a token lists are a set: a thread
// block sorts them in shared memory before it copies keys. The keys of the chosen blocks are numbered from 0, block
// after block. Such a number is called a place; a position is a key's number in its sequence.
namespace cuflash::attention {

// A kernel argument, in kernels whose specification has chosen blocks. cuflash/planning/chosen_pages.py has the record
// as a NumPy dtype. A list head is a group of query heads that share lists and a key/value head.
struct ChosenPages {
  const void* blocks;  // integers [batch, list heads, rows, entries]; those that are not block numbers are ignored
  const void* block_counts;  // integers [batch, list heads, rows]: number of valid entries of each list, or null
  int64_t blocks_strides[4], block_counts_strides[3];  // in elements; 0 along axes that share one array
  int32_t num_rows, num_list_heads, heads_per_list;  // rows are new tokens
  int32_t block, num_blocks, num_entries;  // keys per block, blocks of the longest sequence, entries per list
  int32_t blocks_itemsize, counts_itemsize, is_counts_signed;
  int32_t padding;
};

struct NoChosenPages {};
template <class Config>
using ChosenPagesArgument = FeatureArgument<Config::kIsChosen, ChosenPages, NoChosenPages>;
constexpr NoChosenPages chosen_pages{};

// The list of one new token.
struct OwnList {
  Integers blocks;
  int64_t count;

  CUFLASH_DEVICE OwnList(const ChosenPages& chosen, int sequence, int list_head, int row) {
    const int64_t* const strides = chosen.blocks_strides;
    const auto* const data = static_cast<const unsigned char*>(chosen.blocks);
    const int64_t start = sequence * strides[0] + list_head * strides[1] + row * strides[2];
    blocks = {data + start * chosen.blocks_itemsize, strides[3] * chosen.blocks_itemsize, chosen.blocks_itemsize, true};
    count = chosen.num_entries;
    if (chosen.block_counts == nullptr) return;
    const int64_t* const of_counts = chosen.block_counts_strides;
    const int64_t at = sequence * of_counts[0] + list_head * of_counts[1] + row * of_counts[2];
    const auto* const counts = static_cast<const unsigned char*>(chosen.block_counts) + at * chosen.counts_itemsize;
    count = min(count, Integers{counts, 0, chosen.counts_itemsize, chosen.is_counts_signed != 0}.at(0));
  }
};

// The blocks that a new token attends, in ascending order, in shared memory.
class ChosenKeys {
 public:
  static constexpr int kThreads = 32 * Config::kNumWarps;

  // `room` is shared memory for one bit per block (in words), then one word, then one number per entry. `seen` is the
  // range of positions that the token may attend. Called by all threads; ends with a barrier.
  CUFLASH_DEVICE ChosenKeys(const ChosenPages& chosen, const OwnList& own, const Interval& seen, uint32_t* room)
      : count_(reinterpret_cast<int32_t*>(room) + tile::BitSet::words_of(chosen.num_blocks)), block_(chosen.block),
        seen_(seen) {
    const tile::BitSet set{room, tile::BitSet::words_of(chosen.num_blocks)};
    set.clear<kThreads>();
    __syncthreads();  // the set is empty
    for (int x = threadIdx.x; x < own.count; x += kThreads) {
      const int64_t block = own.blocks.at(x);
      if (block < 0 || block >= chosen.num_blocks) continue;
      const int first = static_cast<int>(block) * block_;
      if (first < seen.hi && first + block_ > seen.lo && seen.lo < seen.hi) set.insert(static_cast<int>(block));
    }
    __syncthreads();  // the set is complete
    if (threadIdx.x < 32) *count_ = set.list(count_ + 1);
    __syncthreads();  // the numbers of the set are stored
  }

  // Return the number of places: the keys of the chosen blocks up to the last one that the token may attend.
  CUFLASH_DEVICE int num_places() const {
    const int num_blocks = *count_;
    if (num_blocks == 0) return 0;
    return (num_blocks - 1) * block_ + min(block_, seen_.hi - count_[num_blocks] * block_);
  }
  CUFLASH_DEVICE int position(int place) const {
    const DivMod at = divmod(place, block_);
    return count_[1 + at.quotient] * block_ + at.remainder;
  }
  CUFLASH_DEVICE const Interval& seen() const { return seen_; }

 private:
  int32_t* const count_;  // the number of blocks, followed by their numbers
  const int block_;
  const Interval seen_;
};

}  // namespace cuflash::attention
