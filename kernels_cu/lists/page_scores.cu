// Computes upper bounds of the scores of queries and pages of a KV cache, from the least and greatest keys that the
// cache keeps: the sum over columns of the greater of the query's products with both. A warp has a page of a key/value
// head and all queries of the heads that share it; the bound of a list is the greatest of its heads. NaN stays NaN.
// cuflash/selectors/cache_pages.py is the specification.
#include <attention/score_math.cuh>
#include <lists/page_choice.cuh>
#include <tile/element.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_page_scores(const __grid_constant__ cuflash::lists::PageChoice params) {
  using namespace cuflash;
  using namespace cuflash::lists;
  using Accumulator = Config::Accumulator;
  using Element = Config::Element;
  constexpr int kWidth = 4;  // columns of a lane whose bounds stay in registers
  // A thread block has pages of one head, since int32 does not hold the numbers of all warps.
  const int block = blockIdx.x, blocks = (params.max_pages + Config::kNumWarps - 1) / Config::kNumWarps;
  const int place = block % blocks * Config::kNumWarps + ptx::thread_index() / 32, matrix = block / blocks;
  const int kv_head = matrix % params.num_kv_heads, sequence = matrix / params.num_kv_heads;
  if (place >= params.num_pages_of(sequence)) return;
  const int page = params.table[static_cast<int64_t>(sequence) * params.max_pages + place];
  const bool has_page = page >= 0 && page < params.num_pages;
  const Element* const least = static_cast<const Element*>(params.key_bounds) +
      (static_cast<int64_t>(has_page ? page : 0) * params.num_kv_heads + kv_head) * 2 * params.num_columns;
  const Element* const greatest = least + params.num_columns;
  Accumulator low[kWidth], high[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int column = 32 * i + ptx::lane();
    low[i] = column < params.num_columns ? tile::to_accumulator(least[column]) : Accumulator(0);
    high[i] = column < params.num_columns ? tile::to_accumulator(greatest[column]) : Accumulator(0);
  }
  const auto scale = static_cast<Accumulator>(params.scale);
  const int group_size = params.num_heads / params.num_kv_heads;
  const auto bound = [&](int head, int query) {
    const Element* const q = static_cast<const Element*>(params.q.data) + sequence * params.q.batch_strides[2] +
                             head * params.q.head_stride + query * params.q.row_stride;
    Accumulator sum = 0;
    const auto add_column = [&](int column, Accumulator least_key, Accumulator greatest_key) {
      const Accumulator x = tile::to_accumulator(q[column * params.q.column_stride]) * scale;
      sum += score::maximum(x * least_key, x * greatest_key);
    };
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (const int column = 32 * i + ptx::lane(); column < params.num_columns) add_column(column, low[i], high[i]);
    for (int column = 32 * kWidth + ptx::lane(); column < params.num_columns; column += 32)
      add_column(column, tile::to_accumulator(least[column]), tile::to_accumulator(greatest[column]));
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
  };
  for (int head = kv_head * group_size; head < (kv_head + 1) * group_size; head += params.heads_of_list)
    for (int query = 0; query < params.num_queries; ++query) {
      Accumulator most = ptx::negative_infinity<Accumulator>();
      for (int other = 0; other < params.heads_of_list; ++other)
        most = score::maximum(most, bound(head + other, query));
      if (!has_page) most = ptx::negative_infinity<Accumulator>();
      if (ptx::lane() != 0) continue;
      const int64_t list = static_cast<int64_t>(sequence) * params.num_lists() + head / params.heads_of_list;
      static_cast<Accumulator*>(params.scores)[(list * params.num_queries + query) * params.max_pages + place] = most;
    }
}
