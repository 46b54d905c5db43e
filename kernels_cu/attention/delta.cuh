#pragma once
#include <attention/mma_operands.cuh>

// What FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) starts with, where tensor cores multiply.
namespace cuflash {

// write(row, delta) of each row of a tile: delta = rowsum(dO o O) - dlse, 0 in rows without a key. A few neighbouring threads
// work on a row.
template <class Write>
CUFLASH_DEVICE void each_delta(const attention::Params& params, const attention::WorkTile& work, Write write) {
  using namespace attention;
  const Shape& shape = params.shape;
  const Place& place = work.place;
  const auto o = matrix<Element>(params.o, place, place.head, shape.seqlen_q, shape.value_dim);
  const auto d_o = matrix<Element>(params.do_, place, place.head, shape.seqlen_q, shape.value_dim);
  const auto lse = matrix<float>(params.lse, place, place.head, shape.seqlen_q, 1);
  const auto dlse = matrix<float>(params.dlse, place, place.head, shape.seqlen_q, 1);
  const bool has_all_chunks = tile::has_chunks(o) && tile::has_chunks(d_o);
  using Share = tile::ChunksOfThread<kThreads, OTile>;
  constexpr int kChunk = OTile::kChunk;
  const int first_chunk = Share::first_chunk();
  for (int first = work.first; first < work.last; first += Share::kRowsAtOnce) {  // whole warps stay together
    const int row = first + Share::first_row();
    const bool is_there = row < work.last;
    const float lse_of = is_there ? lse.at(row, 0) : 0.0f;
    float sum = 0;
    for (int column = first_chunk * kChunk; column < shape.value_dim; column += Share::kThreadsOfRow * kChunk) {
      if (!is_there) continue;
      if (has_all_chunks && column + kChunk <= shape.value_dim) {
        const auto a = reinterpret_cast<const tile::Chunk<Element>&>(o.at(row, column));
        const auto b = reinterpret_cast<const tile::Chunk<Element>&>(d_o.at(row, column));
#pragma unroll
        for (int e = 0; e < kChunk; ++e) sum += tile::widen(a.at[e]) * tile::widen(b.at[e]);
      } else {
        for (int e = column; e < min(column + kChunk, shape.value_dim); ++e)
          sum += tile::widen(o.at(row, e)) * tile::widen(d_o.at(row, e));
      }
    }
#pragma unroll
    for (int step = 1; step < Share::kThreadsOfRow; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (!is_there || first_chunk != 0) continue;
    const bool is_empty = lse_of == ptx::negative_infinity<float>();
    write(row, is_empty ? 0.0f : params.dlse.data == nullptr ? sum : sum - dlse.at(row, 0));
  }
}

// The sums of dQ of a tile are set to 0, where a pass has them.
CUFLASH_DEVICE void clear_dq_sum(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  if (params.dq_sum.data == nullptr) return;
  const int64_t tile = query_tile_number(params, work.first, kBlockQ);
  float* const sums = matrix<float>(params.dq_sum, work.place, work.place.head, 0, 0).data + tile * params.dq_sum.row_stride;
  for (int x = 4 * threadIdx.x; x < kBlockQ * kHeadDim; x += 4 * kThreads)
    *reinterpret_cast<tile::Packet*>(sums + x) = {};
}

}  // namespace cuflash
