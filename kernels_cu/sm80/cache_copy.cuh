#pragma once
#include <sm80/decode_tiles.cuh>

// Copies of K and V from the rows or pages of a cache into the stages of a decode kernel (sm80/decode.cuh).
namespace cuflash::sm80 {

// Copies the rows of K and V that a group of warps reads. Only these warps copy them, so no other warp has to wait. The
// size of a page is a multiple of 16 rows, so that 16 aligned keys are in one page. Pages are looked up one step before
// their rows are copied.
template <class Stage>
class CacheCopy {
 public:
  CUFLASH_DEVICE CacheCopy(const Decode& params, const typename Stage::Arrays& arrays, int sequence, int kv_head,
                           const Sequence& of, const Part& part)
      : cache_(params.cache), arrays_(arrays), sequence_(sequence), kv_head_(kv_head), first_key_(of.first_key),
        stop_(part.stop), next_(part.start + key_group() * kKeysOfWarp),
        k_(first_chunk_of<KTile>(cache_.k, kv_head)), v_(first_chunk_of<VTile>(cache_.v, kv_head)),
        table_(cache_.table == nullptr ? nullptr : cache_.table + static_cast<int64_t>(sequence) * cache_.max_pages) {
    const attention::DivMod first = attention::divmod(next_, cache_.page_size),
                            step = attention::divmod(kBlockKv, cache_.page_size);
    number_ = first.quotient;
    row_ = first.remainder;
    pages_of_step_ = step.quotient;
    rows_of_step_ = step.remainder;
    look_up();
  }

  // Start to copy the rows of the next step. Rows outside the part of the sequence become 0.
  CUFLASH_DEVICE void start_next(int number) {
    const Stage stage = stage_smem<Stage>(number);
    const int first = next_;
    int pages[kUnits], rows[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      pages[unit] = pages_[unit];
      rows[unit] = rows_[unit];
    }
    next_ += kBlockKv;
    look_up();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int position = first + unit * kUnit, page = pages[unit];
      const bool is_page = page >= 0 && page < cache_.num_pages;
      const bool is_part = position + kUnit > first_key_ && position < stop_;
      if (is_part && !is_page && thread() == 0) ptx::fetch_add(cache_.num_faults, 1);
      // The valid rows of the unit; none if it has no page.
      const int first_row = is_page ? first_key_ - position : kUnit, last_row = is_page ? stop_ - position : 0;
      const int64_t from_page = is_page ? page : 0;
      const int to = key_group() * kKeysOfWarp + unit * kUnit;
      copy_rows(stage.keys(), to, k_ + from_page * cache_.k.batch_strides[0] + rows[unit] * cache_.k.row_stride,
                cache_.k.row_stride, cache_.head_dim, first_row, last_row);
      copy_rows(stage.values(), to, v_ + from_page * cache_.v.batch_strides[0] + rows[unit] * cache_.v.row_stride,
                cache_.v.row_stride, cache_.value_dim, first_row, last_row);
      if (thread() < 32)
        stage.start_scales(arrays_, to, {{static_cast<int>(from_page)}, 0, kv_head_}, rows[unit], first_row, last_row);
    }
  }

 private:
  using Stored = typename Stage::Stored;
  using KTile = typename Stage::KTile;
  using VTile = typename Stage::VTile;
  static constexpr int kUnit = 16, kUnits = kKeysOfWarp / kUnit;
  static constexpr int kRowsOfThreads = 32 * kRowGroups / Stage::kThreadsPerRow;
  static constexpr int kRowsPerPass = kRowsOfThreads < kUnit ? kRowsOfThreads : kUnit;

  // The index of a thread among those that copy the same keys.
  static CUFLASH_DEVICE int thread() { return threadIdx.x % (32 * kRowGroups); }
  static CUFLASH_DEVICE int own_row() { return thread() / Stage::kThreadsPerRow; }
  static CUFLASH_DEVICE int own_chunk() { return thread() % Stage::kThreadsPerRow; }
  template <class Tile>
  static CUFLASH_DEVICE const Stored* first_chunk_of(const attention::Matrices& matrices, int head) {
    return static_cast<const Stored*>(matrices.data) + head * matrices.head_stride + own_row() * matrices.row_stride +
           own_chunk() * Tile::kChunk;
  }

  CUFLASH_DEVICE void look_up() {
    int number = number_, row = row_;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      pages_[unit] = sequence_;
      if (table_ != nullptr && next_ + unit * kUnit < stop_) pages_[unit] = table_[number];
      rows_[unit] = row;
      advance(number, row, 0, kUnit);
    }
    advance(number_, row_, pages_of_step_, rows_of_step_);
  }
  // Add pages and rows to a position. A division by the size of a page would take longer than a copy.
  CUFLASH_DEVICE void advance(int& number, int& row, int pages, int rows) const {
    number += pages;
    row += rows;
    if (row < cache_.page_size) return;
    row -= cache_.page_size;
    ++number;
  }

  // Start to copy a thread's chunks of 16 rows, of which rows first_row <= x < last_row exist. Other rows become 0.
  template <class Tile>
  static CUFLASH_DEVICE void copy_rows(Tile tile, int to, const Stored* from, int64_t row_stride, int num_columns,
                                       int first_row, int last_row) {
    static_assert(Tile::kChunks % Stage::kThreadsPerRow == 0, "threads copy as many chunks");
    if (kRowsOfThreads > kRowsPerPass && own_row() >= kRowsPerPass) return;
    const uint32_t start = tile.address(to + own_row(), own_chunk());
#pragma unroll
    for (int row = 0; row < kUnit; row += kRowsPerPass) {
      const bool is_there = own_row() + row >= first_row && own_row() + row < last_row;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; chunk += Stage::kThreadsPerRow) {
        const bool is_copied = is_there && (own_chunk() + chunk) * Tile::kChunk < num_columns;
        ptx::cp_async_cg_16(Tile::advanced(start, row, chunk),
                            from + (is_copied ? row * row_stride + chunk * Tile::kChunk : 0), is_copied ? 16 : 0);
      }
    }
  }

  const attention::CachePages& cache_;
  const typename Stage::Arrays& arrays_;
  const int sequence_, kv_head_, first_key_, stop_;
  int next_;  // the position of the warp's first key in the next step
  const Stored *const k_, *const v_;
  const int32_t* const table_;  // the sequence's row of the page table
  int number_, row_;  // page index in the table, and row in the page, of the key to look up next
  int pages_of_step_, rows_of_step_;
  int pages_[kUnits], rows_[kUnits];
};

}  // namespace cuflash::sm80
