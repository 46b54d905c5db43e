#pragma once
#include <attention/block_iterator.cuh>
#include <tile/register_tile.cuh>

// Masks on scores in the registers of simt kernels.
namespace cuflash::attention {

// Mask of a thread's scores: a bit for each key of each of its queries.
template <int NumKeys>
struct ScoreMask {
  uint64_t bits;

  CUFLASH_DEVICE bool allows(int query, int key) const { return bits >> (query * NumKeys + key) & 1; }
};

// Return the mask of a thread's scores in a step, for the queries query_of(i) < last_query and the keys key_of(j) <
// last_key. The loop over queries is not unrolled: its body would make up most of a kernel's code, and fetching
// instructions takes time too.
template <int NumQueries, int NumKeys, class QueryOf, class KeyOf>
CUFLASH_DEVICE ScoreMask<NumKeys> score_mask(const Params& params, const BatchHead& batch_head, const KvBlock& block,
                                             QueryOf query_of, int last_query, KeyOf key_of, int last_key) {
  static_assert(NumQueries * NumKeys <= 64, "a thread's scores have a bit each");
  uint64_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < NumQueries; ++i) {
    const int query = query_of(i);
    const RowMask row_mask = block.row_mask(params, batch_head, min(query, last_query - 1));
    uint64_t keys = 0;
#pragma unroll
    for (int j = 0; j < NumKeys; ++j) {
      const int key = key_of(j);
      keys |= static_cast<uint64_t>(query < last_query && key < last_key && row_mask.allows(key)) << j;
    }
    bits |= keys << (i * NumKeys);
  }
  return {bits};
}

// Return the mask of a thread's scores in a tile whose rows are queries. The second function does the same for a tile
// whose rows are keys.
template <class Tile>
CUFLASH_DEVICE ScoreMask<Tile::kColumns> score_mask_of_queries(const Params& params, const WorkTile& work,
                                                               const KvBlock& block) {
  return score_mask<Tile::kRows, Tile::kColumns>(
      params, work.batch_head, block, [&](int i) { return work.first + Tile::row(i); }, work.last,
      [&](int j) { return block.start + Tile::column(j); }, block.stop);
}
template <class Tile>
CUFLASH_DEVICE ScoreMask<Tile::kRows> score_mask_of_keys(const Params& params, const WorkTile& work,
                                                         const KvBlock& block) {
  return score_mask<Tile::kColumns, Tile::kRows>(
      params, work.batch_head, block, [&](int j) { return block.start + Tile::column(j); }, block.stop,
      [&](int i) { return work.first + Tile::row(i); }, work.last);
}

// Set the masked scores of a step, and those past the end of the step, to a value.
template <class T, int Rows, int Columns>
CUFLASH_DEVICE void mask_scores(tile::RegisterTile<T, Rows, Columns>& s, const Params& params, const WorkTile& work,
                                const KvBlock& block, T value = ptx::negative_infinity<T>()) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  if (block.kind == BlockKind::kFull && block.stop - block.start == Columns) return;
  const auto score_mask = score_mask_of_queries<Tile>(params, work, block);
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j)
      if (!score_mask.allows(i, j)) s.at[i][j] = value;
}

}  // namespace cuflash::attention
