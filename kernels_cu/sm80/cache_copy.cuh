#pragma once
#include <attention/chosen_pages.cuh>
#include <sm80/decode_tiles.cuh>

// Copies of K and V from the rows or pages of a cache into the stages of a decode kernel (sm80/decode.cuh).
namespace cuflash::sm80 {

// All keys from the first one that a new token sees. Their places are their positions.
struct AllKeys {
  static constexpr bool kAreChosen = false;

  int first_key;

  CUFLASH_DEVICE int position(int place) const { return place; }
  CUFLASH_DEVICE attention::Interval valid(const Part& part) const { return {first_key, part.stop}; }
};

// The keys of chosen blocks.
struct ChosenKeysOf {
  static constexpr bool kAreChosen = true;

  const attention::ChosenKeys& chosen;

  CUFLASH_DEVICE int position(int place) const { return chosen.position(place); }
  CUFLASH_DEVICE attention::Interval valid(const Part&) const { return chosen.seen(); }
};

// The copies of the rows of K and V that a group of warps reads. Only these warps copy them, so no other warp has to
// wait. The sizes of pages and of chosen blocks are multiples of 16 rows, so that 16 aligned keys are in one page.
// Pages are looked up one step before their rows are copied.
template <class Stage, class Keys>
class CacheCopy {
 public:
  CUFLASH_DEVICE CacheCopy(const Decode& params, const typename Stage::Arrays& arrays, int sequence, int kv_head,
                           const Keys& keys, const Part& part)
      : cache_(params.cache), arrays_(arrays), keys_(keys), sequence_(sequence), kv_head_(kv_head),
        valid_(keys.valid(part)), stop_(part.stop), next_(part.start + key_group() * kKeysOfWarp),
        k_(first_chunk_of<KTile>(cache_.k, kv_head)), v_(first_chunk_of<VTile>(cache_.v, kv_head)),
        table_(cache_.table == nullptr ? nullptr : cache_.table + static_cast<int64_t>(sequence) * cache_.max_pages) {
    const attention::DivMod first = attention::divmod(next_, cache_.page_size),
                            step = attention::divmod(kBlockKv, cache_.page_size);
    number_ = first.quotient;
    row_ = first.remainder;
    pages_of_step_ = step.quotient;
    rows_of_step_ = step.remainder;
    look_up();
    are_chunks_ = !Stage::kMayBeUnaligned || (has_chunks(k_, cache_.k) && has_chunks(v_, cache_.v));
  }

  // Start copying the rows of the next step. Rows outside the part of the sequence become 0.
  CUFLASH_DEVICE void start_next(int number) {
    const Stage stage = stage_smem<Stage>(number);
    const int first = next_, chosen_position = position_;
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
      const int place = first + unit * kUnit, page = pages[unit];
      const int position = Keys::kAreChosen ? chosen_position : place;
      const bool is_page = page >= 0 && page < cache_.num_pages;
      const bool is_part = position + kUnit > valid_.lo && place < stop_;
      if (is_part && !is_page && thread() == 0) ptx::fetch_add(cache_.num_faults, 1);
      // The valid rows of the unit; none if the unit has no page.
      const int first_row = is_page ? valid_.lo - position : kUnit;
      const int last_row = is_page && (!Keys::kAreChosen || place < stop_) ? valid_.hi - position : 0;
      const int64_t from_page = is_page ? page : 0;
      const int to = key_group() * kKeysOfWarp + unit * kUnit;
      copy_rows(stage.keys(), to, k_ + from_page * cache_.k.batch_strides[0] + rows[unit] * cache_.k.row_stride,
                cache_.k, cache_.head_dim, first_row, last_row);
      copy_rows(stage.values(), to, v_ + from_page * cache_.v.batch_strides[0] + rows[unit] * cache_.v.row_stride,
                cache_.v, cache_.value_dim, first_row, last_row);
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

  // Return the index of a thread among those that copy the same keys.
  static CUFLASH_DEVICE int thread() { return threadIdx.x % (32 * kRowGroups); }
  static CUFLASH_DEVICE int own_row() { return thread() / Stage::kThreadsPerRow; }
  static CUFLASH_DEVICE int own_chunk() { return thread() % Stage::kThreadsPerRow; }
  template <class Tile>
  static CUFLASH_DEVICE const Stored* first_chunk_of(const attention::Matrices& matrices, int head) {
    return static_cast<const Stored*>(matrices.data) + head * matrices.head_stride + own_row() * matrices.row_stride +
           own_chunk() * Tile::kChunk;
  }

  CUFLASH_DEVICE void look_up() {
    if constexpr (Keys::kAreChosen) return look_up_chosen();
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
  CUFLASH_DEVICE void look_up_chosen() {
    static_assert(!Keys::kAreChosen || kUnits == 1, "the keys of a warp are in one block");
    position_ = next_ < stop_ ? keys_.position(next_) : 0;
    const attention::DivMod at = attention::divmod(position_, cache_.page_size);
    pages_[0] = table_ != nullptr && next_ < stop_ ? table_[at.quotient] : sequence_;
    rows_[0] = at.remainder;
  }
  // Advance a page index and a row by pages and rows. A division by the page size would take longer than a copy.
  CUFLASH_DEVICE void advance(int& number, int& row, int pages, int rows) const {
    number += pages;
    row += rows;
    if (row < cache_.page_size) return;
    row -= cache_.page_size;
    ++number;
  }

  // Return whether rows consist of aligned chunks.
  static CUFLASH_DEVICE bool has_chunks(const Stored* first_chunk, const attention::Matrices& matrices) {
    return tile::has_aligned_chunks(tile::Matrix<const Stored>{first_chunk, matrices.row_stride, matrices.column_stride,
                                                               0, 0});
  }

  // Start copying a thread's chunks of 16 rows, of which rows first_row <= x < last_row exist. Other rows become 0.
  template <class Tile>
  CUFLASH_DEVICE void copy_rows(Tile tile, int to, const Stored* from, const attention::Matrices& matrices,
                                int num_columns, int first_row, int last_row) const {
    static_assert(Tile::kChunks % Stage::kThreadsPerRow == 0, "threads copy as many chunks");
    if (kRowsOfThreads > kRowsPerPass && own_row() >= kRowsPerPass) return;
    if constexpr (Stage::kMayBeUnaligned)
      if (!are_chunks_) return copy_elements(tile, to, from, matrices, num_columns, first_row, last_row);
    const int64_t row_stride = matrices.row_stride;
    const uint32_t start = tile.address(to + own_row(), own_chunk());
    const auto copy = [&](int row, int chunk, bool is_there) {
      ptx::cp_async_cg_16(Tile::advanced(start, row, chunk),
                          from + (is_there ? row * row_stride + chunk * Tile::kChunk : 0), is_there ? 16 : 0);
    };
    if (first_row <= 0 && last_row >= kUnit && num_columns == Tile::kChunks * Tile::kChunk) {  // no chunk is checked
#pragma unroll
      for (int row = 0; row < kUnit; row += kRowsPerPass)
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; chunk += Stage::kThreadsPerRow) copy(row, chunk, true);
      return;
    }
#pragma unroll 1  // keeps the code small
    for (int row = 0; row < kUnit; row += kRowsPerPass) {
      const bool is_there = own_row() + row >= first_row && own_row() + row < last_row;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; chunk += Stage::kThreadsPerRow)
        copy(row, chunk, is_there && (own_chunk() + chunk) * Tile::kChunk < num_columns);
    }
  }

  // Copy the same chunks as `copy_rows`, element by element.
  template <class Tile>
  static CUFLASH_DEVICE void copy_elements(Tile tile, int to, const Stored* from, const attention::Matrices& matrices,
                                           int num_columns, int first_row, int last_row) {
    constexpr int kChunk = Tile::kChunk;
    const Stored* const first_column = from - own_chunk() * kChunk;
#pragma unroll 1
    for (int row = 0; row < kUnit; row += kRowsPerPass) {
      const bool is_there = own_row() + row >= first_row && own_row() + row < last_row;
#pragma unroll 1
      for (int chunk = own_chunk(); chunk < Tile::kChunks; chunk += Stage::kThreadsPerRow) {
        tile::Chunk<Stored> x{};
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const int column = chunk * kChunk + e;
          if (is_there && column < num_columns)
            x.at[e] = first_column[row * matrices.row_stride + column * matrices.column_stride];
        }
        *tile.template pointer<tile::Chunk<Stored>>(tile.offset(to + own_row() + row, chunk)) = x;
      }
    }
  }

  const attention::CachePages& cache_;
  const typename Stage::Arrays& arrays_;
  const Keys& keys_;
  const int sequence_, kv_head_;
  const attention::Interval valid_;  // positions of the keys that are copied
  const int stop_;  // first place after the part
  int next_;  // place of the warp's first key in the next step
  const Stored *const k_, *const v_;
  const int32_t* const table_;  // the sequence's row of the page table
  int number_, row_;  // page index in the table, and row in the page, of the key to look up next
  int pages_of_step_, rows_of_step_;
  int pages_[kUnits], rows_[kUnits];
  int position_ = 0;  // position of the key that is looked up next, if keys are chosen
  bool are_chunks_;
};

}  // namespace cuflash::sm80
