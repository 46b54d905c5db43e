#pragma once
#include <attention/config_mma.cuh>

// The first step of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) for kernels on tensor cores.
namespace cuflash {

// Call write(row, delta) for each row of a tile, with delta = rowsum(dO o O) - dlse, which is 0 in rows without a key.
// A few neighboring threads share a row.
template <class Write>
CUFLASH_DEVICE void for_each_delta(const attention::Params& params, const attention::WorkTile& work, Write write) {
  using namespace attention;
  const Shape& shape = params.shape;
  const BatchHead& batch_head = work.batch_head;
  const auto o = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  const auto d_o = matrix<Element>(params.do_, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
  const auto lse = matrix<float>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);
  const auto dlse = matrix<float>(params.dlse, batch_head, batch_head.head, shape.seqlen_q, 1);
  const bool has_all_chunks = tile::has_aligned_chunks(o) && tile::has_aligned_chunks(d_o);
  using Partition = tile::ChunkPartition<kThreads, OTile>;
  constexpr int kChunk = OTile::kChunk;
  const int first_chunk = Partition::first_chunk();
  for (int first = work.first; first < work.last; first += Partition::kRowsPerPass) {  // uniform in a warp
    const int row = first + Partition::first_row();
    const bool in_bounds = row < work.last;
    const float row_lse = in_bounds ? lse.at(row, 0) : 0.0f;
    float sum = 0;
    for (int column = first_chunk * kChunk; column < shape.value_dim; column += Partition::kThreadsPerRow * kChunk) {
      if (!in_bounds) continue;
      if (has_all_chunks && column + kChunk <= shape.value_dim) {
        const auto a = reinterpret_cast<const tile::Chunk<Element>&>(o.at(row, column));
        const auto b = reinterpret_cast<const tile::Chunk<Element>&>(d_o.at(row, column));
#pragma unroll
        for (int e = 0; e < kChunk; ++e) sum += tile::to_accumulator(a.at[e]) * tile::to_accumulator(b.at[e]);
      } else {
        for (int e = column; e < min(column + kChunk, shape.value_dim); ++e)
          sum += tile::to_accumulator(o.at(row, e)) * tile::to_accumulator(d_o.at(row, e));
      }
    }
#pragma unroll
    for (int thread_offset = 1; thread_offset < Partition::kThreadsPerRow; thread_offset *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, thread_offset);
    if (!in_bounds || first_chunk != 0) continue;
    const bool is_empty = row_lse == ptx::negative_infinity<float>();
    write(row, is_empty ? 0.0f : params.dlse.data == nullptr ? sum : sum - dlse.at(row, 0));
  }
}

// Set the sums of dQ of query tile `tile` to 0, if the backward pass has such sums.
CUFLASH_DEVICE void clear_dq_sum(const attention::Params& params, const attention::WorkTile& work, int64_t tile) {
  using namespace attention;
  if (params.dq_sum.data == nullptr) return;
  float* const sums = matrix<float>(params.dq_sum, work.batch_head, work.batch_head.head, 0, 0).data +
      tile * params.dq_sum.row_stride;
  for (int x = 4 * threadIdx.x; x < kBlockQ * kHeadDim; x += 4 * kThreads)
    *reinterpret_cast<tile::Bits128*>(sums + x) = {};
}

}  // namespace cuflash
