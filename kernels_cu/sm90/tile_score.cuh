#pragma once
#include <attention/page_table.cuh>
#include <sm90/staged_array.cuh>

// Score functions in the forward pass on Hopper.
namespace cuflash::sm90 {

// A score function bound to a thread's queries of a tile: values that do not depend on keys are computed once per tile.
template <class Config, class Tile, class Score>
class TileScore {
 public:
  using T = typename Score::Number;

  // Compute the values that do not depend on keys.
  CUFLASH_DEVICE void prepare(const Score& score, const attention::WorkTile& work, float softmax_scale,
                              attention::PagesArgument<Config> pages) {
    queries_ = {work.first, work.last};
    position_ = attention::QueryPosition<Config>(pages, work.batch_head.batch_index);
    of_tile_ = score.of_tile(work.batch_head.batch_index, work.batch_head.head, softmax_scale);
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) of_query_[i] = score.of_query(of_tile_, query(i));
  }

  // Replace q k^T of a step by the scores.
  template <class Staged>
  CUFLASH_DEVICE void apply(Tile& s, const Score& score, float softmax_scale, const attention::KvBlock& block,
                            Staged staged) const {
    if constexpr (Score::kIsStaged) {
      using Panel = typename Staged::Panel;
      constexpr int kFragments = Panel::kChunks / 2;  // number of fragments of 16 columns
      uint32_t words[4];
      float pairs[Tile::kRows][2];
      // opaque, since otherwise addresses of further stages would occupy registers across steps
      const uint32_t first =
          ptx::opaque(staged.panel(0).address(Tile::warp_row() % 64 + ptx::lane() % 16, ptx::lane() / 16));
      apply_to_each(s, score, softmax_scale, block, [&](int i, int j, const auto&... arguments) {
        if (i == 0 && j % 4 == 0)
          ptx::ldmatrix_x4(words,
                           Panel::advanced(first, 0, j / 4 % kFragments * 2) + j / 4 / kFragments * Panel::kBytes);
        if (j % 2 == 0) to_floats<typename Score::StagedElement>(words[j / 2 % 2 * 2 + i], pairs[i]);
        return score.value(arguments..., pairs[i][j % 2]);
      });
    } else {
      if constexpr (Score::kCanBeUniform) {
        const int first = position(Tile::warp_row()), last = position(Tile::warp_row() + 15);
        if (score.is_uniform(of_tile_, first, last, block.start, block.stop - 1)) {
          const auto uniform = score.of_uniform(of_tile_, first, block.start);
          return apply_to_each(s, score, softmax_scale, block,
                               [&](int, int, const auto&... arguments) { return score.value(arguments..., uniform); });
        }
      }
      apply_to_each(s, score, softmax_scale, block,
                    [&](int, int, const auto&... arguments) { return score.value(arguments...); });
    }
  }

 private:
  struct Column {
    int key;
    typename Score::OfKey of_key;
  };
  template <class ValueOf>
  CUFLASH_DEVICE void apply_to_each(Tile& s, const Score& score, float softmax_scale, const attention::KvBlock& block,
                                    ValueOf value_of) const {
    const attention::PositionsOf<Score> keys({block.start, block.stop}, Tile::first_column());
    // If only distances matter, positions are counted from the thread's first key, so that those of keys are constants.
    constexpr bool kCountsFromKey = Score::kNeedsDistancesAlone;
    typename Score::OfQuery of_query[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int distance = query(i) - block.start - Tile::first_column();
      of_query[i] = kCountsFromKey ? score.of_query(of_tile_, distance) : of_query_[i];
    }
    const auto column_of = [&](int j) -> Column {
      const attention::Position<T> key =
          kCountsFromKey ? attention::Position<T>{Tile::column(j), T(Tile::column(j))} : keys.at(Tile::column(j));
      return {key.whole, score.of_key(of_tile_, key.whole, key.real)};
    };
    attention::for_each_score<Tile>(0, Tile::kColumns, column_of, [&](int i, int j, const Column& column) {
      const T product = Score::kTakesProducts ? s.at(i, j) : s.at(i, j) * softmax_scale;
      s.at(i, j) = value_of(i, j, of_tile_, of_query[i], column.of_key, query(i), column.key, product);
    });
  }
  CUFLASH_DEVICE int position(int row) const {
    if constexpr (Config::kIsPaged) return position_(queries_.at(row));
    else return queries_.at(row);
  }
  CUFLASH_DEVICE int query(int i) const { return position(Tile::first_row() + Tile::row(i)); }

  typename Score::OfTile of_tile_;
  typename Score::OfQuery of_query_[Tile::kRows];
  attention::Positions queries_;
  attention::QueryPosition<Config> position_;
};

// The type that replaces TileScore in kernels without a score function.
template <class Config, class Tile>
struct NoTileScore {
  template <class Score>
  CUFLASH_DEVICE void prepare(const Score&, const attention::WorkTile&, float, attention::PagesArgument<Config>) {}
  template <class Score, class Staged>
  CUFLASH_DEVICE void apply(Tile&, const Score&, float, const attention::KvBlock&, Staged) const {}
};
template <class Config, class Tile>
using TileScoreIf = tile::Conditional<kHasScore, TileScore<Config, Tile, score::Function>, NoTileScore<Config, Tile>>;

}  // namespace cuflash::sm90
