#pragma once
#include <attention/dropout.cuh>
#include <attention/score_math.cuh>
#include <attention/score_slopes.cuh>
#include <sm90/q_pipeline.cuh>

// Score functions and dropout in the backward pass on Hopper, where rows of a tile of scores are keys, and columns are
// queries.
namespace cuflash {

constexpr bool kChangesWeights = kHasScore || config::kHasDropout;
// Slopes depend on scores: P and dS are made together, of S, once dP is there. Else P is made while dP is multiplied.
constexpr bool kMakesPairs = kHasScore && score::Function::kSlopesNeedScore;
constexpr bool kHasSlopes = kHasScore && (!score::Function::kIsShift || score::Function::kAddsGradients);

// A step's tile of scores: where its keys and queries stand.
struct StepPlace {
  const attention::BatchHead& batch_head;
  attention::Positions keys, queries;
};
CUFLASH_DEVICE StepPlace place_of_step(const StepMessage& message) {
  const attention::WorkTile& work = shared().works[message.work].tile;
  return {work.batch_head, {work.first, work.last}, {message.block.start, message.block.stop}};
}

// A score function at the elements of a step that a thread has.
template <class Tile, class Score>
class StepScore {
 public:
  using T = typename Score::Number;

  CUFLASH_DEVICE StepScore(const Score& score, const StepPlace& place)
      : score_(score),
        of_tile_(score.of_tile(place.batch_head.batch_index, place.batch_head.head)),
        queries_(place.queries, Tile::first_column()) {
    const attention::PositionsOf<Score> keys(place.keys, Tile::first_row());
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      keys_[i] = keys.at(Tile::row(i));
      of_key_[i] = score.of_key(of_tile_, keys_[i].whole, keys_[i].real);
    }
  }

  // The scores in the place of q k^T, for 16 queries.
  CUFLASH_DEVICE void apply(Tile& s, int k, float softmax_scale) const {
#pragma unroll
    for (int j = 4 * k; j < 4 * (k + 1); ++j) {
      const attention::Position<T> query = queries_.at(Tile::column(j));
      const auto of_query = score_.of_query(of_tile_, query.whole, query.real);
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i) {
        typename Score::Derivatives slopes;
        s.at(i, j) = score_.value(of_tile_, of_query, of_key_[i], query.whole, keys_[i].whole,
                                  s.at(i, j) * softmax_scale, slopes);
      }
    }
  }

  // Sums of what a step adds to gradients of captured arrays.
  struct Sums {
    typename Score::OfTileSums of_tile;
    typename Score::OfKeySums of_key[Tile::kRows];
    typename Score::OfScoreSums of_score;
  };

  // dS = dF f' in the place of dF, for 16 queries, where slopes do not depend on the score; 0 where P is. Gradients of
  // captured arrays are added to. Called by whole warps.
  CUFLASH_DEVICE void apply_slopes(Tile& p, Tile& df, int k, Sums& sums) const {
#pragma unroll
    for (int j = 4 * k; j < 4 * (k + 1); ++j) {
      const attention::Position<T> query = queries_.at(Tile::column(j));
      const auto of_query = score_.of_query(of_tile_, query.whole, query.real);
      typename Score::OfQuerySums query_sums;
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i) {
        typename Score::Derivatives slopes;
        score_.value(of_tile_, of_query, of_key_[i], query.whole, keys_[i].whole, T(0), slopes);
        if (Score::kAddsGradients && p.at(i, j) != 0)
          score_.add(of_tile_, of_query, of_key_[i], query.whole, keys_[i].whole, T(0), df.at(i, j), slopes,
                     sums.of_tile, query_sums, sums.of_key[i], sums.of_score);
        if constexpr (!Score::kIsShift) {
          // A P of 0 leaves 0 of a finite slope by itself; of one that a whole tile has it is known at once.
          const T ds = df.at(i, j) * slopes.d0;
          df.at(i, j) = !score::is_finite(slopes.d0) && p.at(i, j) == 0 ? T(0) : ds;
        }
      }
      if (Score::kAddsGradients) score_.flush(of_tile_, of_query, query_sums);
    }
  }

  // P and dS in the places of q k^T and dP, for 16 queries. `is_seen(i, j)` and statistics are asked for by a thread's
  // row and column. Called by whole warps.
  template <class IsSeen, class LseOf, class DeltaOf>
  CUFLASH_DEVICE void make_pairs(Tile& s, Tile& dp, float softmax_scale, IsSeen is_seen, LseOf lse_2, DeltaOf delta,
                                 int k, Sums& sums) const {
#pragma unroll
    for (int j = 4 * k; j < 4 * (k + 1); ++j) {
      const attention::Position<T> query = queries_.at(Tile::column(j));
      const auto of_query = score_.of_query(of_tile_, query.whole, query.real);
      typename Score::OfQuerySums query_sums;
      const float query_lse_2 = lse_2(j), query_delta = delta(j);
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i)
        attention::make_pair(s.at(i, j), dp.at(i, j), score_, of_tile_, of_query, of_key_[i], query.whole,
                             keys_[i].whole, softmax_scale, query_lse_2, query_delta, is_seen(i, j),
                             Score::kAddsGradients, sums.of_tile, query_sums, sums.of_key[i], sums.of_score);
      if (Score::kAddsGradients) score_.flush(of_tile_, of_query, query_sums);
    }
  }

  // Add the sums to memory. Called by whole warps.
  CUFLASH_DEVICE void flush(const Sums& sums) const {
    if constexpr (Score::kAddsGradients) {
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i) score_.flush(of_tile_, of_key_[i], sums.of_key[i]);
      score_.flush(of_tile_, sums.of_tile);
      score_.flush(sums.of_score);
    }
  }

 private:
  const Score& score_;
  typename Score::OfTile of_tile_;
  attention::PositionsOf<Score> queries_;
  attention::Position<T> keys_[Tile::kRows];
  typename Score::OfKey of_key_[Tile::kRows];
};

// The same without a score function.
template <class Tile>
struct NoStepScore {
  struct Sums {};
  template <class Score>
  CUFLASH_DEVICE NoStepScore(const Score&, const StepPlace&) {}
  CUFLASH_DEVICE void apply(Tile&, int, float) const {}
  CUFLASH_DEVICE void flush(const Sums&) const {}
};

template <class Tile, class Score, bool HasScore = kHasScore>
struct StepScoreOr {
  using Type = StepScore<Tile, Score>;
};
template <class Tile, class Score>
struct StepScoreOr<Tile, Score, false> {
  using Type = NoStepScore<Tile>;
};
template <class Tile, class Score>
using StepScoreIf = typename StepScoreOr<Tile, Score>::Type;

// Which of a thread's weights are kept. Called by whole warps.
template <class Tile>
CUFLASH_DEVICE attention::KeptFragments<Tile, true> kept_weights_of_step(const attention::Dropout& dropout,
                                                                         const attention::Shape& shape,
                                                                         const StepPlace& place) {
  const uint32_t head = attention::head_number(shape, place.batch_head, place.batch_head.head);
  return attention::kept_fragments<true>(Tile(), attention::Draws(dropout), head, place.keys.first,
                                         place.queries.first);
}

}  // namespace cuflash
