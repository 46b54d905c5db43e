#pragma once
#include <attention/page_table.cuh>
#include <sm90/tensor_maps.cuh>
#include <tile/pipeline.cuh>

// Copies of keys and values from the pages of a KV cache to a room in shared memory.
namespace cuflash {

// By the tensor memory accelerator: a lane looks up the page of a box and has it copied. What has no page is zeros, as is all that
// lies outside of a tensor; who `counts_faults` counts those that should have one. By a warp.
CUFLASH_DEVICE void tma_load_pages(const tile::TmaBoxes& to, const tile::TensorMapParam& map, const attention::Pages& pages,
                                   const tile::PipelineSlot& slot, int sequence, int kv_head, int first, int length,
                                   bool counts_faults) {
  const uint32_t barrier = ptx::shared_address(&slot.full);
  if (tile::lane() == 0) ptx::mbarrier_arrive_expect_tx(barrier, 2 * to.rows * to.columns);
  else if (tile::lane() < tile::kArrivalsPerWarp) ptx::mbarrier_arrive(barrier);
  __syncwarp();
  const int row = tile::lane() * pages.box_rows, position = first + row;
  if (row >= to.rows) return;
  const int page = position < length ? attention::page_of(pages, sequence, position) : pages.num_pages;
  if (counts_faults && position < length && page == pages.num_pages) ptx::fetch_add(pages.num_faults, 1);
  const int row_of_page = attention::divmod(position, pages.page_size).remainder;
  uint32_t box = ptx::shared_address(ptx::dynamic_shared<unsigned char>()) + to.start + 2 * row * to.width;
  for (int column = 0; column < to.columns; column += to.width) {
    ptx::tma_load_5d(box, &map.map, barrier, column, row_of_page, kv_head, page, 0);
    box += 2 * to.rows * to.width;
  }
}

// Row by row, zeros in the place of those that are not the sequence's. By a warp.
CUFLASH_DEVICE void copy_pages(const tile::TmaBoxes& to, const attention::Matrices& matrices, const attention::Pages& pages,
                               const tile::PipelineSlot& slot, int sequence, int kv_head, int first, int length,
                               int num_columns) {
  constexpr int kChunk = tile::kChunkOf<config::Element>;
  const int chunks = to.columns / kChunk, chunks_per_panel = to.width / kChunk;
#pragma unroll 1
  for (int x = tile::lane(); x < to.rows * chunks; x += 32) {
    const int row = x / chunks, chunk = x % chunks, position = first + row;
    const int page = position < length ? attention::page_of(pages, sequence, position) : pages.num_pages;
    const bool is_there = page < pages.num_pages && chunk * kChunk < num_columns;
    const attention::BatchHead place{{0, 0, is_there ? page : 0}, 0, kv_head};
    const int row_of_page = is_there ? position % pages.page_size : 0;
    const auto* const data = &attention::matrix<config::Element>(matrices, place, kv_head, 0, 0)
                                  .at(row_of_page, is_there ? chunk * kChunk : 0);
    ptx::cp_async_cg_16(ptx::shared_address(ptx::dynamic_shared<unsigned char>() + to.at(row, chunk, chunks_per_panel)), data,
                        is_there ? 16 : 0);
  }
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
  tile::arrive(slot.full);
}

// Whether a box of the step that starts at `first` has rows past the sequence, which may be anything.
CUFLASH_DEVICE bool ends_inside_box(const attention::Pages& pages, int first, int num_rows, int length) {
  return length < first + num_rows && attention::divmod(length, pages.box_rows).remainder != 0;
}

}  // namespace cuflash
