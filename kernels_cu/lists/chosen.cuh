#pragma once
#include <attention/integers.cuh>
#include <ptx/thread.cuh>

// The parameters of the kernel that joins the lists of neighboring queries. cuflash/planning/chosen_lists.py has the
// same record as a NumPy dtype. A list head is a batch entry with a group of heads that share lists.
namespace cuflash::lists {

using attention::Integers;
using attention::integers_of;
using attention::kBatchAxes;

struct ChosenParams {
  // Integers [*batch, list heads, seqlen_q, num_chosen]: block indices; numbers that are out of range are ignored
  const void* blocks;
  // Integers [*batch, list heads, seqlen_q]: number of valid entries of each list; null if all are valid. If has_starts,
  // [*batch, list heads, seqlen_q + 1]: number of each list's first entry, where the list before it ends
  const void* counts;
  int64_t blocks_batch_strides[kBatchAxes];  // in bytes; 0 for a broadcast axis; so are all other strides
  int64_t counts_batch_strides[kBatchAxes];
  int64_t blocks_head_stride, blocks_row_stride, blocks_stride, counts_head_stride, counts_row_stride;
  int64_t lower, upper;  // lower <= j - i <= upper: keys that query i may attend; if lo is null
  const int32_t* lo;  // [batch entry, seqlen_q] lo <= j < hi
  const int32_t* hi;
  int64_t rows_batch_stride;  // of lo and hi, in elements; 0 if all batch entries share them
  // Results, as attention/members.cuh describes them.
  int32_t* ranges;
  int32_t* kv_blocks;
  uint32_t* words;
  int32_t batch[kBatchAxes];  // extents of the batch axes of the lists
  int32_t num_heads;  // list heads of a batch entry
  int32_t seqlen_q, seqlen_kv, num_chosen, block, num_blocks;
  int32_t blocks_itemsize, counts_itemsize, is_counts_signed;
  // max_entries: distance between the first entries of consecutive tiles
  int32_t queries_per_tile, num_tiles, words_per_entry, max_entries;
  int32_t blocks_at_once;  // number of blocks for which shared memory has words
  int32_t has_starts;
};

// The list of a query, and the keys that it may attend.
class ChosenList {
 public:
  CUFLASH_DEVICE ChosenList(const ChosenParams& params, int batch_entry, int head, int query)
      : params_(params),
        blocks_{integers_of(params.batch, params.blocks, params.blocks_batch_strides, batch_entry) +
                    head * params.blocks_head_stride + query * params.blocks_row_stride,
                params.blocks_stride, params.blocks_itemsize, true},
        count_(params.num_chosen) {
    if (params.counts != nullptr) {
      const Integers counts{integers_of(params.batch, params.counts, params.counts_batch_strides, batch_entry) +
                                head * params.counts_head_stride,
                            params.counts_row_stride, params.counts_itemsize, params.is_counts_signed != 0};
      count_ = counts.at(query);
      if (params.has_starts) {
        const int64_t start = count_;
        count_ = counts.at(query + 1) - start;
        blocks_.data += start * params.blocks_stride;
      }
    }
    const int64_t row = batch_entry * params.rows_batch_stride + query;
    lo_ = params.lo == nullptr ? query + params.lower : params.lo[row];
    hi_ = params.hi == nullptr ? query + params.upper + 1 : params.hi[row];
  }

  CUFLASH_DEVICE int64_t count() const { return count_; }

  // Return the block of an entry, or -1 if the entry is out of range or the query attends no key of its block.
  CUFLASH_DEVICE int at(int place) const {
    const int64_t block = blocks_.at(place);
    if (place >= count_ || block < 0 || block >= params_.num_blocks) return -1;
    const int64_t first = block * params_.block, last = first + params_.block;
    const bool is_seen = first < hi_ && lo_ < (last < params_.seqlen_kv ? last : params_.seqlen_kv) && lo_ < hi_;
    return is_seen ? static_cast<int>(block) : -1;
  }

 private:
  const ChosenParams& params_;
  Integers blocks_;
  int64_t count_, lo_, hi_;
};

// Return a number of entries that no list of a tile's queries exceeds. Called by a warp.
CUFLASH_DEVICE int longest_list(const ChosenParams& params, int batch_entry, int head, int first_query,
                                int num_queries) {
  if (!params.has_starts) return params.num_chosen;
  int longest = 0;
  for (int row = ptx::lane(); row < num_queries; row += 32)
    longest = max(longest, static_cast<int>(ChosenList(params, batch_entry, head, first_query + row).count()));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, offset));
  return longest;
}

}  // namespace cuflash::lists
