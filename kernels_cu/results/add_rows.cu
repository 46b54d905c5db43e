// Writes rows of two arrays, such as keys and values. Each row is the sum of rows of other arrays in the order of a
// table, rounded once, or zero if it has no term. A rank puts its own keys in place with it, and adds the gradients of
// its keys that ranks have computed. A thread block writes some rows of a matrix. cuflash/distributed/_lanes.py has the
// same sums for the host.
#include <results/params.cuh>
#include <results/rounding.cuh>

namespace cuflash::results {

using Accumulator = Config::Accumulator;
using Element = Config::Element;

template <class T, int kColumns>
struct alignas(kColumns * sizeof(T)) Columns {
  T at[kColumns];
};

// Return the first element of a matrix.
template <class T>
CUFLASH_DEVICE T* matrix_of(T* data, const int64_t (&strides)[2], int batch, int head) {
  return data + batch * strides[0] + head * strides[1];
}

// Write the rows that a block has in a matrix, kColumns columns at a time. Called by all threads.
template <class Term, int kColumns>
CUFLASH_DEVICE void add_rows(const RowSums& sums, const Rows& rows, int matrix, int first, int stop) {
  const int batch = matrix / sums.num_heads, head = matrix % sums.num_heads, parts = rows.num_columns / kColumns;
  const Term* const own = matrix_of(static_cast<const Term*>(rows.own), rows.own_strides, batch, head);
  const Term* const received = matrix_of(static_cast<const Term*>(rows.received), rows.received_strides, batch, head);
  Element* const to = matrix_of(static_cast<Element*>(rows.to), rows.to_strides, batch, head);
  for (int n = ptx::thread_index(); n < (stop - first) * parts; n += kThreads) {
    const int column = n % parts * kColumns;
    const int32_t* const places = sums.table + static_cast<int64_t>(first + n / parts) * (1 + sums.num_terms);
    Accumulator total[kColumns] = {};
    for (int term = 0; term < sums.num_terms; ++term) {
      const int64_t place = places[1 + term];
      if (place < 0) continue;
      const Term* const row = place < sums.num_own_rows
                                  ? own + place * rows.num_columns
                                  : received + (place - sums.num_own_rows) * rows.num_columns;
      const auto x = *reinterpret_cast<const Columns<Term, kColumns>*>(row + column);
      for (int c = 0; c < kColumns; ++c) {
        const Accumulator each = tile::to_accumulator(x.at[c]);
        total[c] = term == 0 ? each : total[c] + each;  // 0 + -0 would be 0
      }
    }
    Columns<Element, kColumns> rounded;
    for (int c = 0; c < kColumns; ++c) round_to(total[c], rounded.at[c]);
    *reinterpret_cast<Columns<Element, kColumns>*>(to + places[0] * static_cast<int64_t>(rows.num_columns) + column) =
        rounded;
  }
}

// Write the rows that a block has in a matrix, in units of 16 bytes of terms if rows consist of these.
template <class Term>
CUFLASH_DEVICE void add_rows(const RowSums& sums, const Rows& rows, int matrix, int first, int stop) {
  constexpr int kColumns = 16 / sizeof(Term);
  const auto is_whole = [](const void* data, const int64_t (&strides)[2]) {
    return reinterpret_cast<uint64_t>(data) % 16 == 0 && strides[0] % kColumns == 0 && strides[1] % kColumns == 0;
  };
  const bool has_units = rows.num_columns % kColumns == 0 && is_whole(rows.own, rows.own_strides) &&
                         is_whole(rows.received, rows.received_strides) && is_whole(rows.to, rows.to_strides);
  if (has_units)
    add_rows<Term, kColumns>(sums, rows, matrix, first, stop);
  else
    add_rows<Term, 1>(sums, rows, matrix, first, stop);
}

}  // namespace cuflash::results

extern "C" __global__ void __launch_bounds__(cuflash::results::kThreads, 1)
results_add_rows(const __grid_constant__ cuflash::results::RowSums sums) {
  using namespace cuflash::results;
  const int blocks_per_matrix = (sums.num_rows + sums.rows_per_block - 1) / sums.rows_per_block;
  const int matrix = blockIdx.x / blocks_per_matrix, first = blockIdx.x % blocks_per_matrix * sums.rows_per_block;
  const int stop = min(first + sums.rows_per_block, sums.num_rows);
  const Rows& rows = sums.arrays[matrix / sums.num_matrices];
  if (sums.is_wide)
    add_rows<Accumulator>(sums, rows, matrix % sums.num_matrices, first, stop);
  else
    add_rows<Element>(sums, rows, matrix % sums.num_matrices, first, stop);
}
