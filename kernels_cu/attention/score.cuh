#pragma once
#include <attention/block_iterator.cuh>
#include <attention/for_each_score.cuh>
#include <attention/score_function.cuh>
#include <attention/softmax_simt.cuh>
#include <tile/register_tile.cuh>

// Score functions on tiles of scores: the positions passed to them, and the replacement of q k^T by their results.
namespace cuflash::attention {

// Return the factor of scores in exponents: 1 if a score function applies the softmax scale itself, else the softmax
// scale.
CUFLASH_DEVICE double exponent_scale(const Shape& shape) {
  return kHasScore && !score::Function::kIsUnscaled ? 1.0 : shape.softmax_scale;
}

// The head and the query of a row of a tile.
struct HeadAndQuery {
  int head, query;
};

// Rows or columns of a tile of scores, as positions first <= x < last. A position past the last one is replaced by the
// last one, so that no index into an array is out of range.
struct Positions {
  int first, last;

  CUFLASH_DEVICE int at(int number) const { return min(first + number, last - 1); }
};

// A position as an integer and as a real number.
template <class T>
struct Position {
  int whole;
  T real;
};

// Positions of rows or columns at constant distances from the first one, in the form that a score function takes. If
// the function reads no array by position, positions may exceed the last one, and their real values are computed as
// sums instead of conversions, which are slow.
template <class Score>
class PositionsOf {
 public:
  using T = typename Score::Number;

  CUFLASH_DEVICE PositionsOf(const Positions& positions, int first)
      : positions_(positions), first_(first), real_(static_cast<T>(positions.first + first)) {}
  CUFLASH_DEVICE Position<T> at(int distance) const {
    const int number = first_ + distance;
    if constexpr (Score::kReadsAtPositions) return {positions_.at(number), static_cast<T>(positions_.at(number))};
    else return {positions_.first + number, real_ + static_cast<T>(distance)};
  }

 private:
  Positions positions_;
  int first_;
  T real_;
};

// Return the score at a thread's row and column, for tiles of multiply-adds and of tensor cores.
template <class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE T& element(tile::RegisterTile<T, Rows, Columns, Run>& s, int i, int j) {
  return s.at[i][j];
}
template <class Tile>
CUFLASH_DEVICE float& element(Tile& s, int i, int j) {
  return s.at(i, j);
}
template <class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE int row_of(const tile::RegisterTile<T, Rows, Columns, Run>& s, int i) {
  return s.row(i);
}
template <class Tile>
CUFLASH_DEVICE int row_of(const Tile& s, int i) {
  return s.first_row() + s.row(i);
}
template <class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE int column_of(const tile::RegisterTile<T, Rows, Columns, Run>& s, int j) {
  return s.column(j);
}
template <class Tile>
CUFLASH_DEVICE int column_of(const Tile& s, int j) {
  return s.first_column() + s.column(j);
}

// Return the distance of a thread's column from the thread's first column.
template <class T, int Rows, int Columns, int Run>
CUFLASH_DEVICE int column_distance(const tile::RegisterTile<T, Rows, Columns, Run>& s, int j) {
  return s.column(j) - s.column(0);
}
template <class Tile>
constexpr CUFLASH_DEVICE int column_distance(const Tile&, int j) {
  return Tile::column(j);
}

// Replace q k^T by the score function of q k^T times `scale`, and multiply the result by `unit`. Rows are queries.
// `query_of(i)` returns the head and query of a thread's row.
template <class Tile, class Score, class QueryOf>
CUFLASH_DEVICE void apply_score(Tile& s, const Score& score, typename Score::Number scale, const BatchHead& batch_head,
                                QueryOf query_of, const Positions& keys, double unit) {
  using T = typename Score::Number;
  const T by = unit;
  HeadAndQuery rows[Tile::kRows];
  typename Score::OfTile of_tile[Tile::kRows];
  typename Score::OfQuery of_query[Tile::kRows];
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    rows[i] = query_of(i);
    of_tile[i] = score.of_tile(batch_head.batch_index, rows[i].head);
    of_query[i] = score.of_query(of_tile[i], rows[i].query);
  }
  const PositionsOf<Score> positions(keys, column_of(s, 0));
  for_each_score<Tile>(
      0, Tile::kColumns, [&](int j) { return positions.at(column_distance(s, j)); },
      [&](int i, int j, const Position<T>& key) {
        T& x = element(s, i, j);
        const auto of_key = score.of_key(of_tile[i], key.whole, key.real);
        x = by * score.value(of_tile[i], of_query[i], of_key, rows[i].query, key.whole, x * scale);
      });
}

// Replace q k^T by the score function, as `apply_score` does, in a tile whose rows are queries of one head.
template <class Tile, class Score>
CUFLASH_DEVICE void score_of_queries(Tile& s, const Score& score, typename Score::Number scale, const WorkTile& work,
                                     const KvBlock& block, double unit) {
  const Positions queries{work.first, work.last}, keys{block.start, block.stop};
  const auto query_of = [&](int i) { return HeadAndQuery{work.batch_head.head, queries.at(row_of(s, i))}; };
  apply_score(s, score, scale, work.batch_head, query_of, keys, unit);
}

}  // namespace cuflash::attention
