// Standard attention, second of three kernels: every row of S becomes P = softmax(S) in its place; lse is written. A
// row belongs to eight threads, which read it three times: for its maximum, its sum, and to write.
#include <attention/online_softmax.cuh>
#include <attention/operands.cuh>
#include <attention/sink.cuh>
#include <attention/work_tile.cuh>

// Four blocks on a multiprocessor: left alone, ptxas 13.0 spills registers of some to have more.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_softmax(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const Place& place = work.place;
  const auto s = matrix<Accumulator>(params.whole.scores, place, place.head, shape.seqlen_q, shape.seqlen_kv);
  const auto lse = matrix<Accumulator>(params.lse, place, place.head, shape.seqlen_q, 1);

  const Accumulator logit = sink_logit<Accumulator>(sink, place, place.head);
  for (int first = work.first; first < work.last; first += tile::kRowLanes) {
    const int query = first + tile::row_lane();
    const bool is_there = query < work.last;  // the others only keep their warp company
    const int num_keys = is_there ? shape.seqlen_kv : 0;
    Accumulator highest = ptx::negative_infinity<Accumulator>();
    for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes)
      highest = tile::greater(highest, s.at(query, key));
    highest = tile::row_max(highest);
    const Accumulator shift = tile::greater(highest, tile::lowest<Accumulator>());  // -inf - (-inf) must not arise
    Accumulator sum = 0;
    for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes)
      sum += ptx::exp2_accurate(s.at(query, key) - shift);
    sum = tile::row_sum(sum);
    // Rows without a key: P = 0, lse = -inf.
    const bool is_empty = highest == ptx::negative_infinity<Accumulator>() && sum == 0;
    const Accumulator divisor = is_empty ? Accumulator(1) : sum;
    Accumulator row_lse = 0, factor = 1;
    if (config::kHasSink) {
      row_lse = highest * Accumulator(kLn2) + ptx::log_accurate(divisor);
      factor = merge_sink(row_lse, logit);
    }
    for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes)
      s.at(query, key) = ptx::exp2_accurate(s.at(query, key) - shift) / divisor * factor;
    if (is_there && tile::leads_rows())
      lse.at(query, 0) = config::kHasSink ? row_lse : highest * Accumulator(kLn2) + ptx::log_accurate(divisor);
  }
}
