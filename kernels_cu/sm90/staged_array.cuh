#pragma once
#include <attention/feature_argument.cuh>
#include <attention/score.cuh>
#include <tile/conditional.cuh>
#include <tile/pipeline.cuh>

// Staged arrays. If a score function reads a captured array of 16-bit numbers, such as a bias, at the query and the key
// of a score, producers load the elements of a step into shared memory, next to the step's keys or queries.
namespace cuflash::sm90 {

constexpr bool kStagesArray = score::Function::kIsStaged;

// The slot of a step in shared memory, in the layout in which TMA copies its elements: one row per query. It starts at
// a multiple of kArrayAlignment bytes.
template <int Rows, int Columns>
using StagedArray = tile::WgmmaTile<ptx::Half, Rows, Columns>;
constexpr int kArrayAlignment = 1024;
// Return the first multiple of kArrayAlignment from `end` on.
CUFLASH_DEVICE constexpr int aligned_for_array(int end) {
  return (end + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
}

// A kernel argument of kernels that stage an array: the array's tensor map. The leading axes of the array are the last
// ones of the map. cuflash/planning/staged_array.py has the record as a NumPy dtype.
struct StagedMap {
  tile::TensorMapParam array;
};
struct NoStagedMap {};
using StagedMapArgument = attention::FeatureArgument<kStagesArray, StagedMap, NoStagedMap>;
constexpr NoStagedMap staged_map{};

// Return whether TMA can copy the array. Otherwise threads copy its elements.
template <class Score>
CUFLASH_DEVICE bool has_staged_map(const StagedMap& map, const Score& score) {
  return map.array.is_valid && reinterpret_cast<uint64_t>(score.staged_data()) % 16 == 0;
}

// Return the coordinates of a batch entry and head's matrix in the tensor map.
template <class Score>
CUFLASH_DEVICE tile::TmaCoords staged_coords(const Score& score, const attention::BatchHead& batch_head) {
  int at[3];
  score.staged_coords(batch_head.batch_index, batch_head.head, at);
  return {at[0], at[1], at[2]};
}

// Convert two 16-bit numbers to floats.
template <class Element>
CUFLASH_DEVICE void to_floats(uint32_t word, float (&pair)[2]) {
  pair[0] = ptx::to_float(Element{static_cast<unsigned short>(word)});
  pair[1] = ptx::to_float(Element{static_cast<unsigned short>(word >> 16)});
}

// Return the part of the array that a step reads: queries and keys first <= x < last.
template <class Score>
CUFLASH_DEVICE auto staged_part(const Score& score, const attention::BatchHead& batch_head,
                                const attention::Positions& queries, const attention::Positions& keys) {
  const auto all = score.staged_array(score.of_tile(batch_head.batch_index, batch_head.head));
  return tile::Matrix<const typename Score::StagedElement>{&all.at(queries.first, keys.first), all.row_stride,
                                                           all.column_stride, queries.last - queries.first,
                                                           keys.last - keys.first};
}

// Whether two types are the same.
template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// A score function that is bound to an additional value: a number of the staged array, or the values of a uniform tile.
template <class Score, class Value>
struct WithValue {
  using Number = typename Score::Number;
  using Derivatives = typename Score::Derivatives;
  static constexpr int kNumBins = Score::kNumBins;

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

}  // namespace cuflash::sm90
