#pragma once
#include <attention/feature_argument.cuh>
#include <attention/score.cuh>
#include <ptx/math.cuh>
#include <tile/philox.cuh>

// Dropout of weights: each weight is set to 0 or multiplied by `factor`. The seed and the weight's position alone
// decide which. cuflash/dropout/weights.py computes the same decisions on the host, and defines which random number
// belongs to which weight.
namespace cuflash::attention {

// A kernel argument: the parameters of dropout, in kernels whose specification has it.
struct Dropout {
  uint64_t seed;  // used unless the kernel reads the seed from an array
  const uint64_t* dropout_seed;  // the array with the seed, or null
  uint32_t offset;
  uint32_t either[8];  // for each bit of the threshold, lowest first: all bits set if the bit is 0
  double factor;  // 1 / (1 - p)
  float single_factor;  // `factor` as a float, since double arithmetic waits for tensor-core products
  // The place of the call in a larger one, in kernels whose specification has it: its first cell and head, and how many
  // heads the call and the larger call have in each batch entry.
  uint32_t first_row, first_column, first_head, num_heads, num_heads_of_all;
};

struct NoDropout : Dropout {};
template <class Config>
using DropoutArgument = FeatureArgument<Config::kHasDropout, Dropout, NoDropout>;
constexpr NoDropout dropout{};

using tile::philox4x32;
using tile::PhiloxWords;

// The position of a weight; `head` counts query heads over all batch entries.
struct WeightPosition {
  uint32_t head;
  int query, key;
};

// Return the number of a query head, counted over all batch entries.
CUFLASH_DEVICE uint32_t head_number(const Shape& shape, const BatchHead& batch_head, int head) {
  return static_cast<uint32_t>(batch_head.batch_index) * static_cast<uint32_t>(shape.num_heads) + head;
}

// The random numbers of a launch, as a function of a weight's position.
class Draws {
 public:
  explicit CUFLASH_DEVICE Draws(const Dropout& dropout) : dropout_(dropout), seed_(dropout.seed) {
    if (Config::kReadsDropoutSeed) seed_ = *dropout.dropout_seed;
  }

  // Replace counters by the words that Philox draws for them. Each counter belongs to a cell of four queries and four
  // keys.
  template <int Num>
  CUFLASH_DEVICE void draw(PhiloxWords (&counters)[Num]) const {
    philox4x32(counters, {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
  }
  CUFLASH_DEVICE PhiloxWords counter(uint32_t head, uint32_t row, uint32_t column) const {
    if (Config::kDropoutIsPlaced) {
      head += dropout_.first_head + head / dropout_.num_heads * (dropout_.num_heads_of_all - dropout_.num_heads);
      row += dropout_.first_row;
      column += dropout_.first_column;
    }
    return {{row, column, head, dropout_.offset}};
  }
  // Return one bit for each weight of two cells, set if the weight is kept; the first cell's bits are in the lower
  // half. A weight's random number has one bit in each half of each word of its cell, the lowest bit in the first word.
  // All numbers are compared with the threshold at once, from the lowest bit on: a number is at least the threshold if
  // its bit is greater, or if the bits are equal and the number formed by the lower bits is at least that of the
  // threshold.
  CUFLASH_DEVICE uint32_t kept(const PhiloxWords& first, const PhiloxWords& second) const {
    uint32_t is_kept = ~0u;
#pragma unroll
    for (int level = 0; level < 8; ++level) {
      const uint32_t bits = ptx::permute_bytes(first.at[level / 2], second.at[level / 2],
                                               level % 2 == 0 ? 0x5410 : 0x7632);
      is_kept = (bits & is_kept) | (dropout_.either[level] & (bits | is_kept));
    }
    return is_kept;
  }

 private:
  const Dropout& dropout_;
  uint64_t seed_;
};

// A source of single weights' bits. It caches the words of the last cell, since successive weights are mostly in one
// cell.
class WeightDraw {
 public:
  explicit CUFLASH_DEVICE WeightDraw(const Draws& draws) : draws_(draws) {}

  CUFLASH_DEVICE bool keeps(const WeightPosition& position) {
    const uint32_t row = position.query / 16 * 4 + position.query % 8 / 2;
    const uint32_t column = position.key / 16 * 4 + position.key % 8 / 2;
    if (is_first_ || row != row_ || column != column_ || position.head != head_) {
      PhiloxWords words[1] = {draws_.counter(position.head, row, column)};
      draws_.draw(words);
      kept_ = draws_.kept(words[0], words[0]);
      is_first_ = false;
      row_ = row;
      column_ = column;
      head_ = position.head;
    }
    const int bit = position.key % 2 * 8 + position.query % 2 * 4 + position.query / 8 % 2 * 2 + position.key / 8 % 2;
    return kept_ >> bit & 1;
  }

 private:
  Draws draws_;
  uint32_t kept_, head_, row_, column_;
  bool is_first_ = true;
};

// The weights of a thread that are kept, one bit each.
template <class Tile>
struct KeptWeights {
  static constexpr int kNumWeights = Tile::kRows * Tile::kColumns;
  uint32_t words[(kNumWeights + 31) / 32];

  CUFLASH_DEVICE bool at(int i, int j) const {
    const int number = i * Tile::kColumns + j;
    return words[number / 32] >> number % 32 & 1;
  }
};

// Return which of a thread's weights are kept, at the positions that `position_of` returns for its rows and columns.
// The loop is not unrolled, to keep the code short.
template <class Tile, class PositionOf>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights(const Draws& draws, PositionOf position_of) {
  using Kept = KeptWeights<Tile>;
  Kept kept;
  WeightDraw draw(draws);
#pragma unroll
  for (int first = 0; first < Kept::kNumWeights; first += 32) {
    uint32_t word = 0;
#pragma unroll 1
    for (int number = first; number < min(first + 32, Kept::kNumWeights); ++number)
      word |= static_cast<uint32_t>(draw.keeps(position_of(number / Tile::kColumns, number % Tile::kColumns)))
          << (number - first);
    kept.words[first / 32] = word;
  }
  return kept;
}

// Return which of a thread's weights are kept in a tile of queries of one head. The second function does the same for a
// tile of keys, whose rows are keys.
template <class Tile>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights_of_queries(const Tile& tile, const Dropout& dropout, const Shape& shape,
                                                         const WorkTile& work, const KvBlock& block) {
  const uint32_t head = head_number(shape, work.batch_head, work.batch_head.head);
  return kept_weights<Tile>(Draws(dropout), [&](int i, int j) {
    return WeightPosition{head, work.first + row_of(tile, i), block.start + column_of(tile, j)};
  });
}
template <class Tile>
CUFLASH_DEVICE KeptWeights<Tile> kept_weights_of_keys(const Tile& tile, const Dropout& dropout, const Shape& shape,
                                                      const WorkTile& work, const KvBlock& block) {
  const uint32_t head = head_number(shape, work.batch_head, work.batch_head.head);
  return kept_weights<Tile>(Draws(dropout), [&](int i, int j) {
    return WeightPosition{head, block.start + column_of(tile, j), work.first + row_of(tile, i)};
  });
}

// Set dropped weights to 0. `p` returns the element at a thread's row and column.
template <class Tile, class POf, class Kept>
CUFLASH_DEVICE void drop_weights(POf p, const Kept& kept) {
  for_each_score_by_rows<Tile>([&](int i, int j) {
    if (!kept.at(i, j)) p(i, j) = 0;
  });
}
template <class Tile, class Kept>
CUFLASH_DEVICE void drop_weights(Tile& p, const Kept& kept) {
  drop_weights<Tile>([&](int i, int j) -> auto& { return element(p, i, j); }, kept);
}

// Replace the gradient with respect to the kept weights by the gradient with respect to all weights, in place.
template <class Tile, class Kept, class T>
CUFLASH_DEVICE void drop_gradients(Tile& dp, const Kept& kept, T factor) {
  for_each_score_by_rows<Tile>(
      [&](int i, int j) { element(dp, i, j) = kept.at(i, j) ? element(dp, i, j) * factor : T(0); });
}

// The weights of a thread that are kept, one bit each, in the accumulator layout of tensor cores. Rows are queries, or
// keys if `IsTransposed`. A word has eight bits for each of four tiles of 16 x 16.
template <class Tile, bool IsTransposed = false>
struct KeptFragments {
  using WeightTile = Tile;
  static_assert(Tile::kColumnTiles % 2 == 0 && Tile::row(1) == 8 && Tile::column(2) == 8, "tiles of 16 x 16");
  static constexpr int kTilesInRow = Tile::kColumnTiles / 2, kNumTiles = Tile::kRowTiles * kTilesInRow;
  uint32_t words[(kNumTiles + 3) / 4];

  static constexpr CUFLASH_DEVICE int tile(int i, int j) { return i / 2 * kTilesInRow + j / 4; }
  static constexpr CUFLASH_DEVICE int bit(int i, int j) {
    const int half = tile(i, j) / 2 % 2, number = tile(i, j) % 2;
    return IsTransposed ? 16 * half + 8 * number + 4 * (j % 2) + 2 * (j / 2 % 2) + i % 2
                        : 16 * half + 8 * (j % 2) + 4 * number + 2 * (i % 2) + j / 2 % 2;
  }
  CUFLASH_DEVICE bool at(int i, int j) const { return words[tile(i, j) / 4] >> bit(i, j) & 1; }
  // Return a word for columns j and j + 1, where j is even: all bits of a half are set if its weight is kept.
  CUFLASH_DEVICE uint32_t halves_at(int i, int j) const {
    static_assert(!IsTransposed, "two neighbours have the same bit of two bytes");
    return ptx::permute_bytes(words[tile(i, j) / 4] << (7 - bit(i, j) % 8), 0, bit(i, j) < 16 ? 0x9988 : 0xbbaa);
  }
  CUFLASH_DEVICE void set(int i, int j, bool is_kept) {
    words[tile(i, j) / 4] |= static_cast<uint32_t>(is_kept) << bit(i, j);
  }
};

// Return which of a thread's weights are kept, in the accumulator layout. `first_row` and `first_column` are the
// position of the tile's first weight. If both are multiples of 16, two threads with neighboring rows each draw every
// other cell of both threads, and exchange bits. Called by whole warps.
template <bool IsTransposed, class Tile>
CUFLASH_DEVICE KeptFragments<Tile, IsTransposed> kept_fragments(const Tile&, const Draws& draws, uint32_t head,
                                                                int first_row, int first_column) {
  using Kept = KeptFragments<Tile, IsTransposed>;
  Kept kept{};
  const int row = first_row + Tile::first_row(), column = first_column + Tile::first_column();
  if ((first_row | first_column) % 16 != 0) {
    const auto scattered = kept_weights<Tile>(draws, [&](int i, int j) {
      const int of_row = row + Tile::row(i), of_column = column + Tile::column(j);
      return IsTransposed ? WeightPosition{head, of_column, of_row} : WeightPosition{head, of_row, of_column};
    });
    for_each_score_by_rows<Tile>([&](int i, int j) { kept.set(i, j, scattered.at(i, j)); });
    return kept;
  }
  const int number = row % 2;  // index (0 or 1) of the 16 x 16 tile in each pair that the thread draws
  const uint32_t row_cell = row / 16 * 4 + row % 8 / 2, column_cell = column / 16 * 4 + column % 8 / 2;
  const uint32_t own = (IsTransposed ? 0x00ff00ffu : 0x0f0f0f0fu) << (IsTransposed ? 8 : 4) * number;
  const int shift = IsTransposed ? (number == 0 ? 8 : 24) : (number == 0 ? 4 : 28);
  constexpr int kNumDraws = (Kept::kNumTiles + 1) / 2;
  constexpr int kAtOnce = kNumDraws % 4 == 0 ? 4 : kNumDraws % 2 == 0 ? 2 : kNumDraws;
  PhiloxWords words[kNumDraws];
#pragma unroll
  for (int first = 0; first < kNumDraws; first += kAtOnce) {
    PhiloxWords together[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int tile = 2 * (first + n) + number;
      const uint32_t of_row = row_cell + 4 * (tile / Kept::kTilesInRow);
      const uint32_t of_column = column_cell + 4 * (tile % Kept::kTilesInRow);
      together[n] = IsTransposed ? draws.counter(head, of_column, of_row) : draws.counter(head, of_row, of_column);
    }
    draws.draw(together);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) words[first + n] = together[n];
  }
#pragma unroll
  for (int n = 0; n < kNumDraws; n += 2) {
    const uint32_t drawn = draws.kept(words[n], words[min(n + 1, kNumDraws - 1)]);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, drawn, 4);
    kept.words[n / 2] = (drawn & own) | ((other << shift | other >> (32 - shift)) & ~own);
  }
  return kept;
}

// Set dropped weights of a tile of queries to 0.
template <class Tile>
CUFLASH_DEVICE void drop_weights_of_queries(Tile& p, const Dropout& dropout, const Shape& shape,
                                            const BatchHead& batch_head, int first_query, int first_key) {
  drop_weights(p, kept_fragments<false>(p, Draws(dropout), head_number(shape, batch_head, batch_head.head),
                                        first_query, first_key));
}

}  // namespace cuflash::attention
