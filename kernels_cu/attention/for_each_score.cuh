#pragma once
#include <ptx/types.cuh>

// The loop over a thread's elements of a score tile. It visits the elements column by column, or row by row, so that
// values that a column or row shares are live only there. The order affects how ptxas allocates registers.
namespace cuflash::attention {

// Call visit(i, j, of_column) for a thread's elements in the columns first <= j < last, where `of_column` is the result
// of column_of(j). Call end_column(of_column) after each column.
template <class Tile, class ColumnOf, class Visit, class EndColumn>
CUFLASH_DEVICE void for_each_score(int first, int last, ColumnOf column_of, Visit visit, EndColumn end_column) {
#pragma unroll
  for (int j = first; j < last; ++j) {
    auto of_column = column_of(j);
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) visit(i, j, of_column);
    end_column(of_column);
  }
}
template <class Tile, class ColumnOf, class Visit>
CUFLASH_DEVICE void for_each_score(int first, int last, ColumnOf column_of, Visit visit) {
  for_each_score<Tile>(first, last, column_of, visit, [](const auto&) {});
}

// Call visit(i, j) for a thread's elements in the columns first <= j < last; without a range, for all its elements.
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_score(int first, int last, Visit visit) {
#pragma unroll
  for (int j = first; j < last; ++j)
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) visit(i, j);
}
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_score(Visit visit) {
  for_each_score<Tile>(0, Tile::kColumns, visit);
}

// Call visit(i, j, of_row) for a thread's elements, row by row, where `of_row` is the result of row_of(i).
template <class Tile, class RowOf, class Visit>
CUFLASH_DEVICE void for_each_score_by_rows(RowOf row_of, Visit visit) {
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const auto of_row = row_of(i);
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) visit(i, j, of_row);
  }
}

// Call visit(i, j) for a thread's elements in the columns first <= j < last, row by row; without a range, for all its
// elements.
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_score_by_rows(int first, int last, Visit visit) {
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = first; j < last; ++j) visit(i, j);
}
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_score_by_rows(Visit visit) {
  for_each_score_by_rows<Tile>(0, Tile::kColumns, visit);
}

}  // namespace cuflash::attention
