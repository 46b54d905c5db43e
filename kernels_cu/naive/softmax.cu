// Standard attention, second of three kernels: it replaces every row of S by P = softmax(S), and writes lse. Eight
// threads share a row and read it three times: for its maximum, for its sum, and to write P.
#include <attention/config_simt.cuh>
#include <attention/dropout.cuh>
#include <attention/sink.cuh>
#include <attention/softmax_simt.cuh>
#include <attention/tile_scheduler.cuh>
#include <naive/score_matrices.cuh>

// Four blocks per multiprocessor: without this bound, ptxas 13.0 tries to fit more blocks, and spills registers in some
// specifications.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_softmax(const __grid_constant__ cuflash::attention::Params params,
              const __grid_constant__ cuflash::naive::ScoreMatrices matrices CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const auto s = matrix<Accumulator>(matrices.scores, batch_head, batch_head.head, shape.seqlen_q, shape.seqlen_kv);
  const auto lse = matrix<Accumulator>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);

  const Accumulator logit = sink_logit<Accumulator>(sink, batch_head, batch_head.head);
  for (int first = work.first; first < work.last; first += tile::kRowLanes) {
    const int query = first + tile::row_lane();
    const bool in_bounds = query < work.last;  // threads past the last row only take part in reductions of their warp
    const int num_keys = in_bounds ? shape.seqlen_kv : 0;
    Accumulator row_highest = ptx::negative_infinity<Accumulator>();
    for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes)
      row_highest = tile::maximum(row_highest, s.at(query, key));
    row_highest = tile::row_max(row_highest);
    const Accumulator shift = tile::maximum(row_highest, tile::lowest<Accumulator>());  // avoids -inf - (-inf)
    Accumulator sum = 0;
    for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes)
      sum += ptx::exp2_accurate(s.at(query, key) - shift);
    sum = tile::row_sum(sum);
    // Rows without a key: P = 0, lse = -inf.
    const bool is_empty = row_highest == ptx::negative_infinity<Accumulator>() && sum == 0;
    const Accumulator divisor = is_empty ? Accumulator(1) : sum;
    Accumulator row_lse = 0, factor = 1;
    if (Config::kHasSink) {
      row_lse = row_highest * Accumulator(kLn2) + ptx::log_accurate(divisor);
      factor = merge_sink(row_lse, logit);
    }
    for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes)
      s.at(query, key) = ptx::exp2_accurate(s.at(query, key) - shift) / divisor * factor;
    if constexpr (Config::kHasDropout) {
      WeightDraw draw{Draws(dropout)};
      const uint32_t head = head_number(shape, batch_head, batch_head.head);
      for (int key = tile::column_lane(); key < num_keys; key += tile::kColumnLanes) {
        Accumulator& p = s.at(query, key);
        p = draw.keeps({head, query, key}) ? p * static_cast<Accumulator>(dropout.factor) : Accumulator(0);
      }
    }
    if (in_bounds && tile::is_row_leader())
      lse.at(query, 0) = Config::kHasSink ? row_lse : row_highest * Accumulator(kLn2) + ptx::log_accurate(divisor);
  }
}
