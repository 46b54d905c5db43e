// Chooses pages of a KV cache for each query of each list, by bounds of their scores. A thread block has a row. The
// pages among which it chooses, and the diagonal, depend on the length of the query's sequence.
// cuflash/selectors/cache_pages.py is the specification.
#include <lists/page_choice.cuh>
#include <lists/searched_row.cuh>

namespace cuflash::lists {

// The scores of a row.
struct ScoresOfPages {
  const Accumulator* pages;

  CUFLASH_DEVICE Accumulator score(const BlocksOfRow&, int column) const { return pages[column]; }
  CUFLASH_DEVICE double share(const BlocksOfRow&, int) const { return 1.0; }
};

// Return the choice of the queries of a sequence.
CUFLASH_DEVICE Choice choice_of(const PageChoice& params, int sequence) {
  Choice choice = params.choice;
  choice.num_kv_blocks = params.num_pages_of(sequence);
  choice.offset = params.is_bottom_right ? params.length_of(sequence) - params.num_queries : 0;
  return choice;
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps, cuflash::Config::kMinBlocks)
lists_page_choice(const __grid_constant__ cuflash::lists::PageChoice params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int number = blockIdx.x;
  const Choice choice = choice_of(params, number / (params.num_lists() * params.num_queries));
  if (choice.num_kv_blocks == 0) {
    int32_t* const list = reinterpret_cast<int32_t*>(choice.kept) + static_cast<int64_t>(number) * choice.list_length;
    for (int at = ptx::thread_index(); at < choice.list_length; at += kSelectionThreads) list[at] = -1;
    return;
  }
  unsigned char* const storage = ptx::dynamic_shared<unsigned char>();
  const ScoresOfPages scores{static_cast<const Accumulator*>(params.scores) +
                             static_cast<int64_t>(number) * params.max_pages};
  Row<BlockOfRow, ScoresOfPages> row(choice, number, {storage}, scores);
  const bool has_count_alone = choice.mass == 0 && !choice.has_threshold && choice.count > 0;
  uint32_t* const room = reinterpret_cast<uint32_t*>(storage);
  if (has_count_alone && choice.keeps_places) list_by_block(row, room);
  else choose_of_row(row, room + kSearchWords);
}
