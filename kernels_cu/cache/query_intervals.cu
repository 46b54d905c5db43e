// Writes the interval of cached keys that each new query attends, computed from the lengths on the device, for the
// attention kernel that follows. It also writes the results of queries that belong to no sequence; the attention kernel
// skips them.
#include <attention/query_intervals.cuh>
#include <attention/sink.cuh>

namespace cuflash::cache {

using attention::QueryIntervals;
using attention::SequenceRows;
using Element = Config::Element;

constexpr int kThreads = 32 * Config::kNumWarps;

// Write the interval of keys that a query attends. Neither bound ever decreases from one query to the next.
CUFLASH_DEVICE void write_interval(const QueryIntervals& params, const SequenceRows& of, int sequence, int row) {
  const int position = of.length - of.count + row;
  int lo = 0, hi = 0;  // empty for a position before the first one
  if (row >= of.count) {
    lo = params.pages.capacity;
    hi = of.length;
  } else if (position >= 0) {
    lo = position - min(params.left, position);
    hi = min(of.length - position, params.right + 1) + position;
  }
  const int64_t at = static_cast<int64_t>(sequence) * params.pages.num_queries + row;
  params.lo[at] = lo;
  params.hi[at] = hi;
}

// Write o = 0 of the queries from `first` on in all heads, and their lse: -inf, or the sink. The warps of a sequence's
// blocks divide the rows among themselves.
CUFLASH_DEVICE void write_empty_rows(const QueryIntervals& params, int sequence, int first, int block,
                                     attention::SinkArgument<Config> sink) {
  const int num_rows = (params.pages.num_queries - first) * params.num_heads, lane = threadIdx.x % 32;
  const int stride = params.blocks_per_sequence * Config::kNumWarps;
  for (int number = block * Config::kNumWarps + threadIdx.x / 32; number < num_rows; number += stride) {
    const int head = number % params.num_heads, row = first + number / params.num_heads;
    const attention::BatchHead place{{sequence}, sequence, head};
    const auto o = attention::matrix<Element>(params.o, place, head, 0, 0);
    for (int column = lane; column < params.value_dim; column += 32) o.at(row, column) = Element{};
    if (lane != 0) continue;
    float lse = ptx::negative_infinity<float>();
    attention::merge_sink(lse, attention::sink_logit<float>(sink, place, head));
    attention::matrix<float>(params.lse, place, head, 0, 0).at(row, 0) = lse;
  }
}

}  // namespace cuflash::cache

extern "C" __global__ void __launch_bounds__(cuflash::cache::kThreads)
cache_query_intervals(const __grid_constant__ cuflash::attention::QueryIntervals params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::cache;
  using namespace cuflash::attention;
  const int sequence = blockIdx.x / params.blocks_per_sequence, block = blockIdx.x % params.blocks_per_sequence;
  const SequenceRows of = rows_of_sequence(params.pages, sequence);
  if (threadIdx.x == 0 && blockIdx.x == 0 && params.tile_counter != nullptr) *params.tile_counter = 0;
  if (threadIdx.x == 0 && block == 0 && !of.is_valid) ptx::fetch_add(params.pages.num_faults, 1);
  for (int row = block * kThreads + threadIdx.x; row < params.pages.num_queries;
       row += params.blocks_per_sequence * kThreads)
    write_interval(params, of, sequence, row);
  write_empty_rows(params, sequence, of.count, block, sink);
}
