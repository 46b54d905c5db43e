#pragma once
#include <attention/dropout.cuh>
#include <attention/score_math.cuh>
#include <attention/score_slopes.cuh>
#include <sm90/backward_scores.cuh>
#include <tile/diagonal_sums.cuh>

// Score functions and dropout in the backward pass on Hopper, where rows of a tile of scores are keys, and columns are
// queries.
namespace cuflash::sm90 {

template <class Config>
struct ChangedWeights : BackwardScores<Config> {
  using Base = BackwardScores<Config>;
  using Base::array_smem, Base::bins_of_warp, Base::kNumConsumers, Base::shared;
  using typename Base::SmemArray, typename Base::StepMessage;

  static constexpr bool kChangesWeights = kHasScore || Config::kHasDropout;
  // If slopes depend on scores, P and dS are computed together from S, once dP has arrived. Otherwise P is computed
  // while the tensor cores compute dP.
  static constexpr bool kMakesPAndDsTogether = kHasScore && score::Function::kSlopesNeedScore;
  static constexpr bool kHasSlopes = kHasScore && (!score::Function::kIsShift || score::Function::kAddsGradients);

  // The positions of the keys and queries of a step's scores.
  struct StepPositions {
    const attention::BatchHead& batch_head;
    attention::Positions keys, queries;
    int stage;  // stage of the step's Q
  };
  static CUFLASH_DEVICE StepPositions positions_of_step(int stage) {
    const StepMessage& message = shared().messages[stage];
    const attention::WorkTile& work = shared().works[message.work].tile;
    return {work.batch_head, {work.first, work.last}, {message.block.start, message.block.stop}, stage};
  }

  // The score function at a thread's elements of a step.
  template <class Tile, class Score>
  class StepScore {
   public:
    using T = typename Score::Number;

    CUFLASH_DEVICE StepScore(const Score& score, const StepPositions& positions)
        : score_(score),
          of_tile_(score.of_tile(positions.batch_head.batch_index, positions.batch_head.head)),
          queries_(positions.queries, Tile::first_column()),
          distance_(positions.keys.first + Tile::warp_row() - positions.queries.first),
          // opaque, so that it takes no registers from step to step
          array_address_(kStagesArray ? ptx::opaque(staged_address(array_smem(positions.stage))) : 0) {
      const attention::PositionsOf<Score> keys(positions.keys, Tile::first_row());
#pragma unroll
      for (int i = 0; i < Tile::kRows; ++i) {
        keys_[i] = keys.at(Tile::row(i));
        of_key_[i] = score.of_key(of_tile_, keys_[i].whole, keys_[i].real);
      }
      if constexpr (Score::kCanBeUniform) {
        const attention::Positions &rows = positions.keys, &queries = positions.queries;
        const int first = rows.at(Tile::warp_row()), last = rows.at(Tile::warp_row() + 15);
        is_uniform_ = score.is_uniform(of_tile_, queries.first, queries.last - 1, first, last);
        if (is_uniform_) uniform_ = score.of_uniform(of_tile_, queries.first, first);
      }
    }

    // The sums of one step that are added to the gradients of captured arrays. `of_distances` are those of 16 queries,
    // in the thread's part of the diagonals of the warp's 16 keys.
    struct Sums {
      tile::DiagonalSums<T> of_distances;
      typename Score::OfTileSums of_tile;
      typename Score::OfKeySums of_key[Tile::kRows];
      typename Score::OfScoreSums of_score;
      typename Score::OfUniformSums of_uniform;
    };

    // Replace q k^T by the scores, for 16 queries.
    CUFLASH_DEVICE void apply(Tile& s, int k, float softmax_scale) const {
      by_form([&](auto form) { apply_in<decltype(form)>(s, k, softmax_scale); });
    }

    // Replace dF by dS = dF f' for 16 queries, if slopes do not depend on the score; dS is 0 where P is 0. Also add to
    // the gradients of captured arrays. Called by whole warps.
    CUFLASH_DEVICE void apply_slopes(Tile& p, Tile& df, int k, Sums& sums) const {
      by_form([&](auto form) { apply_slopes_in<decltype(form)>(p, df, k, sums); });
    }

    // Replace q k^T by P and dP by dS for 16 queries. `is_seen(i, j)` and the statistics are functions of a thread's
    // row and column. Called by whole warps.
    template <class IsSeen, class LseOf, class DeltaOf>
    CUFLASH_DEVICE void make_p_and_ds(Tile& s, Tile& dp, float softmax_scale, IsSeen is_seen, LseOf lse_2,
                                      DeltaOf delta, int k, Sums& sums) const {
      by_form(
          [&](auto form) { make_p_and_ds_in<decltype(form)>(s, dp, softmax_scale, is_seen, lse_2, delta, k, sums); });
    }

    // Prepare the bins of a table's gradient for the sums of a step. Called by whole warps.
    CUFLASH_DEVICE void start_bins(typename Score::OfScoreSums& of_steps) const {
      if constexpr (Score::kNumBins > 0) score_.start_bins(of_tile_, bins_of_warp(), of_steps);
    }

    using StepSums = typename Score::OfScoreSums;  // sums of several steps

    // Add the sums of a step to memory. The sums of a uniform step are instead added to `of_steps`, the sums of
    // successive steps that read the same elements. Called by whole warps.
    CUFLASH_DEVICE void flush(const Sums& sums, StepSums& of_steps) const {
      if constexpr (Score::kAddsGradients) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i) score_.flush(of_tile_, of_key_[i], sums.of_key[i]);
        score_.flush(of_tile_, sums.of_tile);
        if constexpr (Score::kCanBeUniform) {
          if (is_uniform_) return score_.flush(of_tile_, uniform_, sums.of_uniform, of_steps);
        }
        score_.flush(sums.of_score);
      }
    }

   private:
    // The ways to read captured arrays: one element per score, one element for the warp's tile, or a staged element.
    struct OfEach {};
    struct OfUniform {};
    struct OfStaged {};
    struct StagedWords {
      uint32_t at[4];  // two queries per word: the warp's keys 0 to 7 and 8 to 15, in the first and the last 8 queries
    };

    // Call visit with the way in which this step reads captured arrays.
    template <class Visit>
    CUFLASH_DEVICE void by_form(Visit visit) const {
      if constexpr (Score::kIsStaged) return visit(OfStaged());
      if constexpr (Score::kCanBeUniform)
        if (is_uniform_) return visit(OfUniform());
      if constexpr (!Score::kIsStaged) visit(OfEach());
    }

    // Return the address of eight keys of a query, from which a warp loads fragments of 16 keys and 16 queries.
    static CUFLASH_DEVICE uint32_t staged_address(SmemArray array) {
      const int key = Tile::warp_row() + ptx::lane() / 8 % 2 * 8, query = ptx::lane() / 16 * 8 + ptx::lane() % 8;
      return array.panel(key / SmemArray::kPanelWidth).address(query, key % SmemArray::kPanelWidth / 8);
    }
    // Return the elements for a thread's keys and 16 queries, or zeros if they are not staged. Called by whole warps.
    template <class Form>
    CUFLASH_DEVICE StagedWords staged_words(int k) const {
      StagedWords words{};
      if constexpr (kIsSame<Form, OfStaged>)
        ptx::ldmatrix_x4_trans(words.at, SmemArray::Panel::advanced(array_address_, 16 * k, 0));
      return words;
    }

    // Return the score function at a thread's element.
    template <class Form>
    CUFLASH_DEVICE decltype(auto) function_at(int i, int j, const StagedWords& words) const {
      if constexpr (kIsSame<Form, OfStaged>) {
        float pair[2];
        to_floats<typename Score::StagedElement>(words.at[j / 2 % 2 * 2 + i], pair);
        return WithValue<Score, T>{score_, pair[j % 2]};
      } else if constexpr (kIsSame<Form, OfUniform>) {
        return WithValue<Score, typename Score::OfUniform>{score_, uniform_};
      } else {
        return (score_);
      }
    }
    // Return the sums to which a thread's element is added.
    template <class Form>
    static CUFLASH_DEVICE auto& sums_of_score(Sums& sums, int i, int j) {
      if constexpr (kIsSame<Form, OfUniform>) return sums.of_uniform;
      else if constexpr (Score::kSumsByDistance) return sums.of_distances.at(i, j % 4);
      else return sums.of_score;
    }
    // Add the sums of the diagonals of 16 queries to memory, and clear them. Called by whole warps.
    template <class Form>
    CUFLASH_DEVICE void flush_distances(Sums& sums, int k) const {
      if constexpr (Score::kSumsByDistance && !kIsSame<Form, OfUniform>) {
        const T sum = sums.of_distances.of_lane();
        sums.of_distances = {};
        // All pairs at this distance read the same element, so query 0 stands for all queries, whether its key exists or
        // not. The sum of a diagonal without scores is 0; its element may not exist.
        if (sum != 0) score_.flush_distance(of_tile_, 0, distance_ - 16 * k + sums.of_distances.distance(), sum);
      }
    }

    // The values that the scores of a query share, and the query's sums.
    struct Column {
      int query;
      typename Score::OfQuery of_query;
      typename Score::OfQuerySums sums;
    };
    struct ColumnWithStatistics : Column {
      float lse_2, delta;
    };
    CUFLASH_DEVICE Column column(int j) const {
      const attention::Position<T> query = queries_.at(Tile::column(j));
      return {query.whole, score_.of_query(of_tile_, query.whole, query.real), {}};
    }
    CUFLASH_DEVICE void flush_column(const Column& column) const {
      if (Score::kAddsGradients) score_.flush(of_tile_, column.of_query, column.sums);
    }

    template <class Form>
    CUFLASH_DEVICE void apply_in(Tile& s, int k, float softmax_scale) const {
      const auto words = staged_words<Form>(k);
      const auto visit = [&](int i, int j, const Column& column) {
        typename Score::Derivatives slopes;
        s.at(i, j) = function_at<Form>(i, j, words)
                         .value(of_tile_, column.of_query, of_key_[i], column.query, keys_[i].whole,
                                s.at(i, j) * softmax_scale, slopes);
      };
      attention::for_each_score<Tile>(4 * k, 4 * (k + 1), [&](int j) { return column(j); }, visit);
    }

    template <class Form>
    CUFLASH_DEVICE void apply_slopes_in(Tile& p, Tile& df, int k, Sums& sums) const {
      const auto words = staged_words<Form>(k);
      const auto visit = [&](int i, int j, Column& column) {
        typename Score::Derivatives slopes;
        const auto& function = function_at<Form>(i, j, words);
        function.value(of_tile_, column.of_query, of_key_[i], column.query, keys_[i].whole, T(0), slopes);
        // Sums in bins and registers are added without a branch, which would have to wait for each element.
        constexpr bool kAddsZeros = Score::kNumBins > 0 || Score::kSumsByDistance;
        const T kept_df = p.at(i, j) != 0 ? df.at(i, j) : T(0);
        if (Score::kAddsGradients && (kAddsZeros || p.at(i, j) != 0))
          function.add(of_tile_, column.of_query, of_key_[i], column.query, keys_[i].whole, T(0),
                       kAddsZeros ? kept_df : df.at(i, j), slopes, sums.of_tile, column.sums, sums.of_key[i],
                       sums_of_score<Form>(sums, i, j));
        if constexpr (!Score::kIsShift) {
          // If the slope is finite, a P of 0 makes dS 0 without a test. If the whole tile has one slope, a single test
          // determines whether it is finite.
          const T ds = df.at(i, j) * slopes.d0;
          df.at(i, j) = !score::is_finite(slopes.d0) && p.at(i, j) == 0 ? T(0) : ds;
        }
      };
      attention::for_each_score<Tile>(
          4 * k, 4 * (k + 1), [&](int j) { return column(j); }, visit,
          [&](const Column& column) { flush_column(column); });
      flush_distances<Form>(sums, k);
    }

    template <class Form, class IsSeen, class LseOf, class DeltaOf>
    CUFLASH_DEVICE void make_p_and_ds_in(Tile& s, Tile& dp, float softmax_scale, IsSeen is_seen, LseOf lse_2,
                                         DeltaOf delta, int k, Sums& sums) const {
      const auto words = staged_words<Form>(k);
      const auto visit = [&](int i, int j, ColumnWithStatistics& column) {
        attention::score_to_p_and_ds(s.at(i, j), dp.at(i, j), function_at<Form>(i, j, words), of_tile_, column.of_query,
                                     of_key_[i], column.query, keys_[i].whole, softmax_scale, column.lse_2,
                                     column.delta, is_seen(i, j), Score::kAddsGradients, sums.of_tile, column.sums,
                                     sums.of_key[i], sums_of_score<Form>(sums, i, j));
      };
      attention::for_each_score<Tile>(
          4 * k, 4 * (k + 1), [&](int j) { return ColumnWithStatistics{column(j), lse_2(j), delta(j)}; }, visit,
          [&](const Column& column) { flush_column(column); });
      flush_distances<Form>(sums, k);
    }

    const Score& score_;
    typename Score::OfTile of_tile_;
    attention::PositionsOf<Score> queries_;
    int distance_;  // the warp's first key minus the first query
    uint32_t array_address_;  // address of the rows, in the step's elements, that the thread reads for its warp
    bool is_uniform_ = false;
    typename Score::OfUniform uniform_;
    attention::Position<T> keys_[Tile::kRows];
    typename Score::OfKey of_key_[Tile::kRows];
  };

  // The type that replaces StepScore in kernels without a score function.
  template <class Tile>
  struct NoStepScore {
    struct Sums {};
    struct StepSums {};
    template <class Score>
    CUFLASH_DEVICE NoStepScore(const Score&, const StepPositions&) {}
    CUFLASH_DEVICE void apply(Tile&, int, float) const {}
    CUFLASH_DEVICE void start_bins(StepSums&) const {}
    CUFLASH_DEVICE void flush(const Sums&, StepSums&) const {}
  };

  template <class Tile, class Score>
  using StepScoreIf = tile::Conditional<kHasScore, StepScore<Tile, Score>, NoStepScore<Tile>>;

  // Add the last sums of uniform steps to memory. Called by whole warps.
  template <class Score, class StepSums>
  static CUFLASH_DEVICE void finish_sums(const Score& score, const StepSums& of_steps) {
    if constexpr (Score::kNumBins > 0) score.finish_bins(bins_of_warp(), of_steps);
    else if constexpr (Score::kAddsGradients && Score::kCanBeUniform) score.flush(of_steps);
  }

  // Store dS of a step as the gradient of the staged array. All consumers have stored dS in shared memory.
  template <class Score, class SmemDs>
  static CUFLASH_DEVICE void store_gradient(const Score& score, const StepPositions& positions, SmemDs ds) {
    const auto all = score.staged_gradient(score.of_tile(positions.batch_head.batch_index, positions.batch_head.head));
    const attention::Positions &keys = positions.keys, &queries = positions.queries;
    const tile::Matrix<typename Score::StagedElement> part{&all.at(queries.first, keys.first), all.row_stride,
                                                           all.column_stride, queries.last - queries.first,
                                                           keys.last - keys.first};
    tile::copy<kNumConsumers * kWarpgroupThreads>(part, tile::TmaBoxes(ds), ptx::thread_index() - kWarpgroupThreads);
  }

  // Return which of a thread's weights dropout keeps, one bit each. Called by whole warps.
  template <class Tile>
  static CUFLASH_DEVICE attention::KeptFragments<Tile, true> kept_weights_of_step(const attention::Dropout& dropout,
                                                                                  const attention::Shape& shape,
                                                                                  const StepPositions& positions) {
    const uint32_t head = attention::head_number(shape, positions.batch_head, positions.batch_head.head);
    return attention::kept_fragments<true>(Tile(), attention::Draws(dropout), head, positions.keys.first,
                                           positions.queries.first);
  }
};

}  // namespace cuflash::sm90
