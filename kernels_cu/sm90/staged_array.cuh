#pragma once
#include <attention/score.cuh>
#include <ptx/cp_async.cuh>
#include <tile/copy.cuh>
#include <tile/swizzled_tile.cuh>

// Staged arrays: a score function reads a captured array of 16-bit numbers, such as a bias, at the query and the key of
// a score. Producers load the elements of a step into shared memory, beside the step's keys or queries.
namespace cuflash {

constexpr bool kStagesArray = score::Function::kIsStaged;

// The slot of a step: a row for each query. It starts at a multiple of kArrayAlignment bytes.
template <int Rows, int Columns>
using StagedArray = tile::SwizzledTile<uint16_t, Rows, Columns>;
constexpr int kArrayAlignment = 128;
// Return the first offset from `end` on at which slots can lie.
CUFLASH_DEVICE constexpr int aligned_for_array(int end) {
  return (end + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
}

// Convert two 16-bit numbers to floats.
template <class Element>
CUFLASH_DEVICE void to_floats(uint32_t word, float (&pair)[2]) {
  pair[0] = ptx::to_float(Element{static_cast<unsigned short>(word)});
  pair[1] = ptx::to_float(Element{static_cast<unsigned short>(word >> 16)});
}

// The part of a matrix that a step reads: queries and keys first <= x < last.
template <class Element>
struct StagedPart {
  tile::Matrix<Element> matrix;
  attention::Positions queries, keys;

  // Start to copy the part, by threads of which `thread` is one. Elements past its ends become 0. Elements that
  // cp.async cannot copy are copied at once.
  template <int Threads, int kUnroll, class Slot>
  CUFLASH_DEVICE void start_copy(Slot to, int thread) const {
    static_assert(Slot::kChunks % 8 == 0, "eight chunks are permuted among each other");
    static_assert(Threads % Slot::kChunks == 0 && Slot::kRows % (Threads / Slot::kChunks) == 0, "whole rows at a time");
    constexpr int kRowsAtOnce = Threads / Slot::kChunks;
    const int chunk = thread % Slot::kChunks, num_rows = queries.last - queries.first;
    const int remaining = min(max(keys.last - keys.first - 8 * chunk, 0), 8);
    const Element* from = &matrix.at(queries.first, keys.first) + 8 * chunk * matrix.column_stride;
    const bool is_aligned = matrix.column_stride == 1 && matrix.row_stride % 8 == 0 &&
        reinterpret_cast<uint64_t>(&matrix.at(queries.first, keys.first)) % 16 == 0;
    if (!is_aligned) return copy_each<kRowsAtOnce>(to, thread, remaining);
    from += thread / Slot::kChunks * matrix.row_stride;
#pragma unroll kUnroll
    for (int first = 0; first < Slot::kRows; first += kRowsAtOnce) {
      const int row = first + thread / Slot::kChunks;
      const bool in_bounds = row < num_rows && remaining > 0;
      ptx::cp_async_cg_16(to.address(row, chunk), in_bounds ? from : matrix.data,
                          in_bounds ? 2 * remaining : 0);
      from += kRowsAtOnce * matrix.row_stride;
    }
  }

 private:
  template <int RowsAtOnce, class Slot>
  CUFLASH_DEVICE void copy_each(Slot to, int thread, int remaining) const {
    const int chunk = thread % Slot::kChunks;
#pragma unroll 1
    for (int row = thread / Slot::kChunks; row < Slot::kRows; row += RowsAtOnce) {
      const Element* const from = &matrix.at(queries.at(row), keys.first) + 8 * chunk * matrix.column_stride;
      auto* const elements = to.template pointer<unsigned short>(Slot::offset(row, chunk));
#pragma unroll 1
      for (int e = 0; e < 8; ++e) elements[e] = e < remaining ? from[e * matrix.column_stride].bits : 0;
    }
  }
};

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// A score function bound to a value beside its arguments: a number of the staged array, or the values of a uniform
// tile.
template <class Score, class Value>
struct WithValue {
  using Number = typename Score::Number;
  using Derivatives = typename Score::Derivatives;

  const Score& score;
  Value given;

  template <class... Arguments>
  CUFLASH_DEVICE Number value(Arguments&&... arguments) const {
    return score.value(arguments..., given);
  }
  template <class... Arguments>
  CUFLASH_DEVICE void add(Arguments&&... arguments) const {
    score.add(arguments...);
  }
};

}  // namespace cuflash
