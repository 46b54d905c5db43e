#pragma once
#include <attention/score.cuh>
#include <tile/philox.cuh>

// Dropout of weights: each is 0 or is multiplied by `factor`, by a number that the seed and its place alone determine. The
// host's half is cuflash/dropout/weights.py, which says which number is whose.
namespace cuflash::attention {

// The parameters of a kernel whose specification has dropout, an argument of its own.
struct Dropout {
  uint32_t round_keys[20];       // of the ten rounds, two each; of a kernel that does not read the seed
  const uint64_t* dropout_seed;  // read by a kernel that does
  uint32_t offset;
  uint32_t threshold;  // times 2^16: a weight is dropped whose number is below it
  double factor;       // 1 / (1 - p)
  float single_factor;  // the same rounded: the unit for doubles waits for products of tensor cores
};

// The argument as functions take it; other kernels have none, and hand over the constant in its place.
struct NoDropout : Dropout {};
template <bool HasDropout>
struct DropoutArgumentIf {
  using Type = const Dropout&;
};
template <>
struct DropoutArgumentIf<false> {
  using Type = NoDropout;
};
using DropoutArgument = DropoutArgumentIf<config::kHasDropout>::Type;
constexpr NoDropout dropout{};

using tile::philox4x32;
using tile::PhiloxWords;

// Where a weight stands: `head` counts query heads over all batch entries.
struct WeightPlace {
  uint32_t head;
  int query, key;
};

CUFLASH_DEVICE uint32_t head_number(const Shape& shape, const BatchHead& batch_head, int head) {
  return static_cast<uint32_t>(batch_head.batch_index) * static_cast<uint32_t>(shape.num_heads) + head;
}

// What the numbers of a launch depend on beside their places.
class Draws {
 public:
  explicit CUFLASH_DEVICE Draws(const Dropout& dropout) : dropout_(dropout), seed_(0) {
    if (config::kReadsDropoutSeed) seed_ = *dropout.dropout_seed;
  }

  // The numbers of two rows and four columns each, eight in the four words.
  template <int Num>
  CUFLASH_DEVICE void draw(PhiloxWords (&counters)[Num]) const {
    philox4x32(counters, [&](int number) -> uint32_t {
      if (!config::kReadsDropoutSeed) return dropout_.round_keys[number];
      const uint32_t steps = number / 2;
      return number % 2 == 0 ? static_cast<uint32_t>(seed_) + steps * 0x9E3779B9u
                             : static_cast<uint32_t>(seed_ >> 32) + steps * 0xBB67AE85u;
    });
  }
  CUFLASH_DEVICE PhiloxWords counter(uint32_t head, uint32_t row, uint32_t column) const {
    return {{row, column, head, dropout_.offset}};
  }
  // By a number in the lower half of a word, or in the upper one.
  CUFLASH_DEVICE bool keeps(uint32_t word, int half) const {
    return (half ? word : word << 16) >= dropout_.threshold;
  }

 private:
  const Dropout& dropout_;
  uint64_t seed_;
};

// Draws weight by weight, and remembers the numbers drawn last: neighbours have them too.
class WeightDraw {
 public:
  explicit CUFLASH_DEVICE WeightDraw(const Draws& draws) : draws_(draws) {}

  CUFLASH_DEVICE bool keeps(const WeightPlace& place) {
    const uint32_t row = place.query / 16 * 8 + place.query % 8, column = place.key / 16 * 4 + place.key % 8 / 2;
    if (is_first_ || row != row_ || column != column_ || place.head != head_) {
      words_[0] = draws_.counter(place.head, row, column);
      draws_.draw(words_);
      is_first_ = false;
      row_ = row;
      column_ = column;
      head_ = place.head;
    }
    const bool is_lower_row = place.query % 16 >= 8, is_right = place.key % 16 >= 8;
    const uint32_t(&words)[4] = words_[0].at;
    const uint32_t left = is_lower_row ? words[2] : words[0], right = is_lower_row ? words[3] : words[1];
    return draws_.keeps(is_right ? right : left, place.key % 2);
  }

 private:
  Draws draws_;
  PhiloxWords words_[1];
  uint32_t head_, row_, column_;
  bool is_first_ = true;
};

// Which of a thread's weights are kept, a bit each.
template <class Tile>
struct KeptWeights {
  static constexpr int kNumWeights = Tile::kRows * Tile::kColumns;
  uint32_t words[(kNumWeights + 31) / 32];

  CUFLASH_DEVICE bool at(int i, int j) const {
    const int number = i * Tile::kColumns + j;
    return words[number / 32] >> number % 32 & 1;
  }
};

// The same, wherever they stand: `place_of` says it by a thread's row and column. In a loop, whose text is short.
template <class Tile, class PlaceOf>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights(const Draws& draws, PlaceOf place_of) {
  using Kept = KeptWeights<Tile>;
  Kept kept;
  WeightDraw draw(draws);
#pragma unroll
  for (int first = 0; first < Kept::kNumWeights; first += 32) {
    uint32_t word = 0;
#pragma unroll 1
    for (int number = first; number < min(first + 32, Kept::kNumWeights); ++number)
      word |= static_cast<uint32_t>(draw.keeps(place_of(number / Tile::kColumns, number % Tile::kColumns)))
          << (number - first);
    kept.words[first / 32] = word;
  }
  return kept;
}

// Of a tile of queries of one head, and of a tile of keys, whose rows are keys.
template <class Tile>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights_of_queries(const Tile& tile, const Dropout& dropout, const Shape& shape,
                                                         const WorkTile& work, const KvBlock& block) {
  const uint32_t head = head_number(shape, work.batch_head, work.batch_head.head);
  return kept_weights<Tile>(Draws(dropout), [&](int i, int j) {
    return WeightPlace{head, work.first + row_of(tile, i), block.start + column_of(tile, j)};
  });
}
template <class Tile>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights_of_keys(const Tile& tile, const Dropout& dropout, const Shape& shape,
                                                      const WorkTile& work, const KvBlock& block) {
  const uint32_t head = head_number(shape, work.batch_head, work.batch_head.head);
  return kept_weights<Tile>(Draws(dropout), [&](int i, int j) {
    return WeightPlace{head, block.start + column_of(tile, j), work.first + row_of(tile, i)};
  });
}

// Set weights that are dropped to 0. `p` is asked for by a thread's row and column.
template <class Tile, class POf>
CUFLASH_DEVICE void drop_weights(POf p, const KeptWeights<Tile>& kept) {
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      if (!kept.at(i, j)) p(i, j) = 0;
}
template <class Tile>
CUFLASH_DEVICE void drop_weights(Tile& p, const KeptWeights<Tile>& kept) {
  drop_weights<Tile>([&](int i, int j) -> auto& { return element(p, i, j); }, kept);
}

// The gradient by all weights from that by the weights that are left, in its place.
template <class Tile, class T>
CUFLASH_DEVICE void drop_gradients(Tile& dp, const KeptWeights<Tile>& kept, T factor) {
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) element(dp, i, j) = kept.at(i, j) ? element(dp, i, j) * factor : T(0);
}

// visit(i, j, is_kept) of a thread's weights as tensor cores hold them, rows being queries. Where both sides of the tile start
// at multiples of 16, all numbers that are drawn at once are the thread's.
template <class Tile, class Visit>
CUFLASH_DEVICE void for_each_weight(const Tile& tile, const Draws& draws, uint32_t head, int first_query, int first_key,
                                    Visit visit) {
  static_assert(Tile::kColumnTiles % 2 == 0 && Tile::row(1) == 8 && Tile::column(2) == 8, "a draw is for 16 x 16");
  if ((first_query | first_key) % 16 != 0) {
    const auto kept = kept_weights<Tile>(draws, [&](int i, int j) {
      return WeightPlace{head, first_query + row_of(tile, i), first_key + column_of(tile, j)};
    });
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumns; ++j) visit(i, j, kept.at(i, j));
    return;
  }
  const uint32_t row = (first_query + Tile::warp_row()) / 2 + Tile::first_row() % 8;
  const uint32_t column = (first_key + Tile::warp_column()) / 4 + Tile::first_column() % 8 / 2;
  constexpr int kInRow = Tile::kColumnTiles / 2, kNum = Tile::kRowTiles * kInRow;
  constexpr int kAtOnce = kNum % 4 == 0 ? 4 : kNum % 5 == 0 ? 5 : kNum % 3 == 0 ? 3 : kNum % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int first = 0; first < kNum; first += kAtOnce) {
    PhiloxWords words[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      words[n] = draws.counter(head, row + 8 * ((first + n) / kInRow), column + 4 * ((first + n) % kInRow));
    draws.draw(words);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        visit(2 * ((first + n) / kInRow) + e / 4, 4 * ((first + n) % kInRow) + e % 4,
              draws.keeps(words[n].at[e / 2], e % 2));
  }
}

// `kept_weights` as tensor cores hold weights, rows being queries.
template <class Tile>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights_of_fragments(const Tile& tile, const Draws& draws, uint32_t head,
                                                           int first_query, int first_key) {
  KeptWeights<Tile> kept{};
  for_each_weight(tile, draws, head, first_query, first_key, [&](int i, int j, bool is_kept) {
    const int number = i * Tile::kColumns + j;
    kept.words[number / 32] |= static_cast<uint32_t>(is_kept) << number % 32;
  });
  return kept;
}

// Set weights of a tile of queries that are dropped to 0.
template <class Tile>
CUFLASH_DEVICE void drop_weights_of_queries(Tile& p, const Dropout& dropout, const Shape& shape,
                                            const BatchHead& batch_head, int first_query, int first_key) {
  for_each_weight(p, Draws(dropout), head_number(shape, batch_head, batch_head.head), first_query, first_key,
                  [&](int i, int j, bool is_kept) {
                    if (!is_kept) p.at(i, j) = 0;
                  });
}

}  // namespace cuflash::attention
