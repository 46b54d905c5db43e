#pragma once
#include <attention/page_table.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

// Copies of a step's keys or values from the pages of a KV cache to a slot in shared memory, box by box; a box lies
// within one page. A warp starts the copies, and each of its lanes looks up the page of one box.
namespace cuflash::sm90 {

template <class Element>
class PageCopy {
 public:
  // The rows are positions from `first` on, of which those in `seen` are needed. Rows of boxes that contain no needed
  // position become 0.
  CUFLASH_DEVICE PageCopy(const tile::TmaBoxes& to, const attention::Pages& pages, int sequence, int kv_head, int first,
                          const attention::Interval& seen)
      : to_(to), pages_(pages), kv_head_(kv_head), first_(first), seen_(seen), row_(tile::lane() * pages.box_rows) {
    const int position = first + row_;
    const bool is_seen = row_ < to.rows && position < seen.hi && position + pages.box_rows > seen.lo;
    has_page_ = !is_seen || (page_ = attention::page_of(pages, sequence, position)) < pages.num_pages;
    if (!is_seen) page_ = pages.num_pages;
    row_of_page_ = attention::divmod(position, pages.page_size).remainder;
  }

  // Count the boxes without a page as faults.
  CUFLASH_DEVICE void count_faults() const {
    if (!has_page_) ptx::fetch_add(pages_.num_faults, 1);
  }

  // Copy the boxes of which only some rows are needed, row by row; their other rows become 0.
  CUFLASH_DEVICE void copy_cut_boxes(const attention::Matrices& matrices, int num_columns) {
    const int start = first_ + row_, stop = start + pages_.box_rows;
    const bool is_cut = page_ < pages_.num_pages && (start < seen_.lo || stop > seen_.hi);
    cut_ = __ballot_sync(0xffffffffu, is_cut);
    if (cut_ == 0) return;
#pragma unroll 1
    for (uint32_t rest = cut_; rest != 0; rest &= rest - 1) copy_box(matrices, num_columns, __ffs(rest) - 1);
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // Start TMA copies of the other boxes. TMA fills positions outside the tensor with 0, so a missing page reads as
  // zeros.
  CUFLASH_DEVICE void start(const tile::TensorMapParam& map, const tile::PipelineSlot& slot) const {
    const uint32_t barrier = ptx::shared_address(&slot.full);
    const int num_rows = to_.rows - __popc(cut_) * pages_.box_rows;
    if (tile::lane() == 0) ptx::mbarrier_arrive_expect_tx(barrier, 2 * num_rows * to_.columns);
    else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(barrier);
    __syncwarp();
    if (row_ >= to_.rows || cut_ >> tile::lane() & 1) return;
    uint32_t box = ptx::shared_address(ptx::dynamic_shared<unsigned char>()) + to_.start + 2 * row_ * to_.width;
    for (int column = 0; column < to_.columns; column += to_.width) {
      ptx::tma_load_5d(box, &map.map, barrier, column, row_of_page_, kv_head_, page_, 0);
      box += 2 * to_.rows * to_.width;
    }
  }

 private:
  // Copy the box of a lane. Called by the whole warp.
  CUFLASH_DEVICE void copy_box(const attention::Matrices& matrices, int num_columns, int lane) const {
    constexpr int kChunk = tile::kChunkOf<Element>;
    const int page = __shfl_sync(0xffffffffu, page_, lane), row_of_page = __shfl_sync(0xffffffffu, row_of_page_, lane);
    const int first_row = lane * pages_.box_rows, chunks = to_.columns / kChunk, chunks_per_panel = to_.width / kChunk;
    const attention::BatchHead page_head{{0, 0, page}, 0, kv_head_};
    const auto all = attention::matrix<Element>(matrices, page_head, kv_head_, 0, 0);
    const auto box = all.rows(row_of_page, row_of_page);
#pragma unroll 1
    for (int x = tile::lane(); x < pages_.box_rows * chunks; x += 32) {
      const int row = x / chunks, chunk = x % chunks, position = first_ + first_row + row;
      const bool is_needed = position >= seen_.lo && position < seen_.hi && chunk * kChunk < num_columns;
      const auto* const data = is_needed ? &box.at(row, chunk * kChunk) : box.data;
      const int at = to_.at(first_row + row, chunk, chunks_per_panel);
      ptx::cp_async_cg_16(ptx::shared_address(ptx::dynamic_shared<unsigned char>() + at), data, is_needed ? 16 : 0);
    }
  }

  const tile::TmaBoxes to_;
  const attention::Pages& pages_;
  const int kv_head_, first_;
  const attention::Interval seen_;
  const int row_;  // first row of the lane's box
  int page_, row_of_page_;
  bool has_page_;  // whether the lane's box has a page, or needs none
  uint32_t cut_ = 0;  // bits of the lanes whose boxes are copied row by row
};

}  // namespace cuflash::sm90
