#pragma once
#include <attention/score.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/tma.cuh>
#include <tile/copy.cuh>

// A captured array of 16-bit numbers that a score function reads at the query and the key of a score, such as a bias:
// its elements of a step lie in shared memory, where producers put them beside the step's keys or queries.
namespace cuflash {

constexpr bool kStagesArray = score::Function::kIsStaged;

// The room of a step: a row for each query, so far apart that eight rows meet no bank twice.
template <int Rows, int Columns>
struct StagedArray {
  static constexpr int kPitch = 2 * Columns + 16, kBytes = Rows * kPitch;
  static_assert(Columns % 8 == 0, "rows start at multiples of 16 bytes");

  int start;  // bytes from the start of shared memory

  CUFLASH_DEVICE unsigned char* at(int row, int column) const {
    return ptx::dynamic_shared<unsigned char>() + start + row * kPitch + 2 * column;
  }

  // Two numbers of a row, of which the first has an even column.
  template <class Element>
  static CUFLASH_DEVICE void load_pair(const unsigned char* from, float (&pair)[2]) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(from);
    pair[0] = ptx::to_float(Element{static_cast<unsigned short>(word)});
    pair[1] = ptx::to_float(Element{static_cast<unsigned short>(word >> 16)});
  }
};

// The part of a matrix that a step reads: queries and keys first <= x < last.
template <class Element>
struct StagedPart {
  tile::Matrix<Element> matrix;
  attention::Positions queries, keys;

  CUFLASH_DEVICE int num_bytes() const { return 2 * (keys.last - keys.first); }  // of a row
  // Whether bulk copies can bring its rows: whole packets of 16 bytes.
  CUFLASH_DEVICE bool has_whole_packets() const {
    return matrix.column_stride == 1 && matrix.row_stride % 8 == 0 && keys.first % 8 == 0 && num_bytes() % 16 == 0 &&
        reinterpret_cast<uint64_t>(matrix.data) % 16 == 0;
  }
  CUFLASH_DEVICE const Element* row(int number) const { return &matrix.at(queries.at(number), keys.first); }

  // Start the copies of rows `thread`, `thread` + Threads and so on; past the last query the rows are that query's. The
  // barrier expects the bytes of all rows.
  template <int Threads, int Rows, int Columns>
  CUFLASH_DEVICE void start_copies(StagedArray<Rows, Columns> to, int thread, const uint64_t& full) const {
#pragma unroll 1
    for (int i = thread; i < Rows; i += Threads)
      ptx::bulk_load(ptx::shared_address(to.at(i, 0)), row(i), num_bytes(), ptx::shared_address(&full));
  }

  // Copy all of it by threads, of which `thread` is one.
  template <int Threads, int Rows, int Columns>
  CUFLASH_DEVICE void copy(StagedArray<Rows, Columns> to, int thread) const {
    const int num_columns = keys.last - keys.first;
#pragma unroll 1
    for (int i = 0; i < Rows; ++i) {
      const Element* const from = row(i);
#pragma unroll 1
      for (int j = thread; j < num_columns; j += Threads)
        *reinterpret_cast<unsigned short*>(to.at(i, j)) = from[j * matrix.column_stride].bits;
    }
  }
};

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// A score function with what it is given beside its arguments: a number of the staged array, or values of a uniform
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
