// Attention of a few queries to keys and values in arrays, with the loop of the decode kernels (sm80/decode.cuh). A
// tile holds the queries of all heads that share a key/value head, and each query attends an interval of keys.
#include <sm80/plain_stage.cuh>

namespace cuflash::sm80 {

using PlainStage = PlainStageIf<true>;
constexpr int kSharedBytes = kBytesOfDecode<PlainStage>;

// Return the matrices of a batch entry.
CUFLASH_DEVICE attention::Matrices of_batch_entry(attention::Matrices matrices, const attention::BatchHead& heads) {
  matrices.data = attention::matrix<Element>(matrices, heads, 0, 0, 0).data;
  return matrices;
}

// Return the parameters of the decode loop for a batch entry, whose keys and values form a single page.
CUFLASH_DEVICE Decode decode_of(const attention::Params& params, const attention::DecodeParts& parts,
                                const attention::BatchHead& heads) {
  const attention::Shape& shape = params.shape;
  Decode of{};
  of.q = params.q;
  of.o = params.o;
  of.lse = params.lse;
  of.cache.k = of_batch_entry(params.k, heads);
  of.cache.v = of_batch_entry(params.v, heads);
  of.cache.num_pages = 1;
  of.cache.page_size = 1 << 30;  // beyond any key
  of.cache.head_dim = shape.head_dim;
  of.cache.value_dim = shape.value_dim;
  of.o_parts = parts.o_parts;
  of.stats_parts = parts.stats_parts;
  of.arrivals = parts.arrivals;
  of.group_size = shape.group_size;
  of.num_queries = shape.seqlen_q;
  of.max_parts = shape.num_splits;
  of.softmax_scale = shape.softmax_scale;
  return of;
}

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_few_queries(const __grid_constant__ cuflash::attention::Params params,
                 const __grid_constant__ cuflash::attention::DecodeParts parts CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const DivMod by_part = divmod(blockIdx.x, params.shape.num_splits);
  WorkTile work = packed_query_tile(params, kBlockQ, params.shape.num_splits);
  work.last = params.shape.seqlen_q;  // all heads have the same queries
  const BatchHead& heads = work.batch_head;
  const Decode of_entry = decode_of(params, parts, heads);
  const VisitRange keys = visit_range_of_queries(params, work);
  const Sequence of{max(keys.start, keys.stop), params.shape.seqlen_q, keys.start, true};
  const Part part = part_of<kBlockKv>(of_entry, of, by_part.remainder);
  if (part.number >= part.num_parts) return;
  start_queries(of_entry, heads);
  const int kv_head = divmod(heads.head, params.shape.group_size).quotient;
  decode<PlainStage>(of_entry, {}, {heads, 0, kv_head, by_part.quotient, part},
                     QueriesInOrder<PackedQueries>{{params, heads, keys}, of.first_key}, sink, score_function);
}
