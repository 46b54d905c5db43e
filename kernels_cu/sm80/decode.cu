// Attention of a few new tokens to the keys and values of a cache (split-KV decoding: Flash-Decoding, T. Dao et al., 2023).
// A block works on a part of one sequence's keys for one key/value head, with the queries of all heads that share it as rows
// of one tile. Its warps share keys, not rows: each has its own softmax, and they merge at the end. How a sequence is cut into
// parts follows from its own length alone, and parts are merged in their order by whichever block ends last: results of a
// sequence have the same bits whoever else is in the batch, and wherever its pages lie.
#include <attention/config_mma.cuh>
#include <attention/decode_work.cuh>
#include <attention/sink.cuh>
#include <ptx/cp_async.cuh>
#include <tile/accumulator_layout.cuh>

namespace cuflash {

using attention::Decode;
using attention::Part;
using attention::Sequence;
using config::kNumStages;

constexpr int kRowGroups = kBlockQ / 16, kKeyGroups = kNumWarps / kRowGroups, kKeysOfWarp = kBlockKv / kKeyGroups;
using Scores = tile::WarpTile<1, kKeysOfWarp / 8, kRowGroups, kKeyGroups>;
using Output = tile::WarpTile<1, kValueDim / 8, kRowGroups>;
using WarpV = tile::SwizzledTile<Element, kKeysOfWarp, kValueDim>;
using Softmax = attention::LazySoftmax<Scores::kRows>;  // of its scale alone: its maxima are those of a whole warp
static_assert(kRowGroups * kKeyGroups == kNumWarps && kKeysOfWarp % 16 == 0 && kBlockKv % 16 == 0, "warps share evenly");

constexpr QTile q_smem{0};
constexpr int kStageBytes = KTile::kBytes + VTile::kBytes;
CUFLASH_DEVICE KTile k_smem(int stage) { return {QTile::kBytes + stage * kStageBytes}; }
CUFLASH_DEVICE VTile v_smem(int stage) { return {QTile::kBytes + stage * kStageBytes + KTile::kBytes}; }

// In the place of queries, keys and values, once all of them are read.
constexpr int kFloatsOfWarp = Output::kColumnTiles * 4 * 32;
constexpr int kStatsFloats = 2 * kKeyGroups * kBlockQ;
constexpr int kMergeFloats = kStatsFloats + kKeyGroups / 2 * kRowGroups * kFloatsOfWarp;
constexpr int kMostParts = 128;
constexpr int kSharedFloats = (QTile::kBytes + kNumStages * kStageBytes) / 4;
static_assert(kMergeFloats <= kSharedFloats && (kMostParts + 1) * kBlockQ <= kSharedFloats, "there is room for what is merged");
CUFLASH_DEVICE float* merge_room() { return ptx::dynamic_shared<float>(); }

// The rows of K and V that a thread copies in each step, a chunk of every eight: which page holds them is looked up one step
// ahead of their copies.
class CacheCopy {
 public:
  CUFLASH_DEVICE CacheCopy(const Decode& params, int sequence, int kv_head, const Sequence& of, const Part& part)
      : cache_(params.cache), sequence_(sequence), kv_head_(kv_head), first_key_(of.first_key), stop_(part.stop),
        next_(part.start + Partition::first_row()) {
    look_up();
  }

  // Start to copy the next step's rows; zeros in the place of rows that are not the part's.
  CUFLASH_DEVICE void start_next(int stage) {
    const int first = next_;
    int pages[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) pages[pass] = pages_[pass];
    next_ += kBlockKv;
    look_up();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int position = first + pass * kRowsPerPass, page = pages[pass];
      const bool is_part = position >= first_key_ && position < stop_;
      const bool is_page = page >= 0 && page < cache_.num_pages;
      if (is_part && !is_page && Partition::first_chunk() == 0) ptx::fetch_add(cache_.num_faults, 1);
      const bool is_there = is_part && is_page;
      const attention::BatchHead place{{is_there ? page : 0}, 0, kv_head_};
      const int row = is_there ? position % cache_.page_size : 0, to = Partition::first_row() + pass * kRowsPerPass;
      copy_row(k_smem(stage), to, cache_.k, place, row, cache_.head_dim, is_there);
      copy_row(v_smem(stage), to, cache_.v, place, row, cache_.value_dim, is_there);
    }
  }

 private:
  using Partition = tile::ChunkPartition<kThreads, KTile>;
  static_assert(KTile::kChunks % 8 == 0 && VTile::kChunks % 8 == 0, "eight threads copy a row of either");
  static constexpr int kRowsPerPass = Partition::kRowsPerPass, kPasses = kBlockKv / kRowsPerPass;
  static_assert(kBlockKv % kRowsPerPass == 0, "all threads copy as many rows");

  CUFLASH_DEVICE void look_up() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int position = next_ + pass * kRowsPerPass;
      pages_[pass] = sequence_;
      if (cache_.table != nullptr && position < stop_)
        pages_[pass] = cache_.table[static_cast<int64_t>(sequence_) * cache_.max_pages + position / cache_.page_size];
    }
  }

  template <class Tile>
  static CUFLASH_DEVICE void copy_row(Tile to, int to_row, const attention::Matrices& matrices,
                                      const attention::BatchHead& place, int row, int num_columns, bool is_there) {
    const Element* const data = &attention::matrix<Element>(matrices, place, place.head, 0, 0).at(row, 0);
#pragma unroll
    for (int c = 0; c < Tile::kChunks; c += Partition::kThreadsPerRow) {
      const int chunk = Partition::first_chunk() + c, column = chunk * Tile::kChunk;
      const bool has_column = column < num_columns;
      ptx::cp_async_cg_16(to.address(to_row, chunk), data + (has_column ? column : 0), is_there && has_column ? 16 : 0);
    }
  }

  const attention::CachePages& cache_;
  const int sequence_, kv_head_, first_key_, stop_;
  int next_;  // the position of the thread's first row in the next step
  int pages_[kPasses];
};

// Maximum and sum of a thread's rows, in the units of q k^T; each row's follow from its own scores alone.
struct RowStats {
  float max[Scores::kRows], sum[Scores::kRows];

  static CUFLASH_DEVICE float shift(float max) { return max == ptx::negative_infinity<float>() ? 0 : max; }
  static CUFLASH_DEVICE float weight(float max, float to, float softmax_scale_log2) {
    return ptx::exp2_approx((max - shift(to)) * softmax_scale_log2);
  }

  // Scores become weights, and what has been summed before is scaled by what the maximum rose.
  CUFLASH_DEVICE void update(Scores& s, Output& o, float softmax_scale_log2) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      float highest = max[i];
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) highest = fmaxf(highest, s.at(i, j));
      highest = tile::quad_max(highest);
      const float factor = weight(max[i], highest, softmax_scale_log2);
      max[i] = highest;
      float step = 0;
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {
        s.at(i, j) = weight(s.at(i, j), highest, softmax_scale_log2);
        step += s.at(i, j);
      }
      sum[i] = sum[i] * factor + step;
      o.scale_row(i, factor);
    }
  }
};

// Merge what the warps that share keys have; those of the first keys get it all.
CUFLASH_DEVICE void merge_warps(RowStats& stats, Output& o, float softmax_scale_log2) {
  const int key_group = threadIdx.x / 32 / kRowGroups, row_group = threadIdx.x / 32 % kRowGroups;
  float* const maxima = merge_room();
  float* const sums = maxima + kKeyGroups * kBlockQ;
  ptx::cp_async_wait<0>();
  __syncthreads();  // queries, keys and values are read
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int at = key_group * kBlockQ + o.first_row() + o.row(i);
    const float sum = tile::quad_sum(stats.sum[i]);
    if (o.first_column() != 0) continue;
    maxima[at] = stats.max[i];
    sums[at] = sum;
  }
  __syncthreads();  // every warp's are there
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    float highest = maxima[row], sum = 0;
#pragma unroll
    for (int group = 1; group < kKeyGroups; ++group) highest = fmaxf(highest, maxima[group * kBlockQ + row]);
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group)
      sum += sums[group * kBlockQ + row] * RowStats::weight(maxima[group * kBlockQ + row], highest, softmax_scale_log2);
    o.scale_row(i, RowStats::weight(stats.max[i], highest, softmax_scale_log2));
    stats.max[i] = highest;
    stats.sum[i] = sum;
  }
  using Layout = tile::AccumulatorLayout<Output, 4>;
#pragma unroll
  for (int half = kKeyGroups / 2; half > 0; half /= 2) {
    const int slot = key_group % half * kRowGroups + row_group;
    float* const room = merge_room() + kStatsFloats + slot * kFloatsOfWarp + 4 * ptx::lane();
    if (key_group >= half && key_group < 2 * half) Layout::store_shared(room, o);
    __syncthreads();  // what others add is there
    if (key_group < half) Layout::add_shared(room, o, 0, Output::kColumnTiles);
    __syncthreads();  // and read
  }
}

// o and lse of a row: o is to be multiplied by what is returned.
CUFLASH_DEVICE float finish_row(const Decode& params, const attention::BatchHead& heads, int row, float max, float sum,
                                float softmax_scale_log2, attention::SinkArgument sink) {
  using namespace attention;
  const int head = heads.head + row / params.num_queries;
  const bool is_empty = max == ptx::negative_infinity<float>() && sum == 0;
  float lse = max, factor = 0;
  if (!is_empty) {
    lse = ptx::fma(max, softmax_scale_log2 * static_cast<float>(kLn2), ptx::log_accurate(sum));
    factor = 1 / sum;
  }
  if constexpr (config::kHasSink) factor *= merge_sink(lse, sink_logit<float>(sink, heads, head));
  matrix<float>(params.lse, heads, head, params.num_queries, 1).at(row % params.num_queries, 0) = lse;
  return factor;
}
CUFLASH_DEVICE Element& o_at(const Decode& params, const attention::BatchHead& heads, int row, int column) {
  const int head = heads.head + row / params.num_queries;
  return attention::matrix<Element>(params.o, heads, head, 0, 0).at(row % params.num_queries, column);
}

// The results of a sequence that is one part. By the warps that hold them.
CUFLASH_DEVICE void write_results(const Decode& params, const attention::BatchHead& heads, const RowStats& stats, Output& o,
                                  float softmax_scale_log2, attention::SinkArgument sink) {
  const int num_rows = params.group_size * params.num_queries;
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row >= num_rows) continue;
    const float factor = finish_row(params, heads, row, stats.max[i], stats.sum[i], softmax_scale_log2, sink);
    o.scale_row(i, factor);
#pragma unroll
    for (int j = 0; j < Output::kColumns; ++j) {
      const int column = o.first_column() + o.column(j);
      if (column < params.cache.value_dim) tile::to_element(o.at(i, j), o_at(params, heads, row, column));
    }
  }
}

// What a part leaves to be merged. By the warps that hold it.
CUFLASH_DEVICE void write_part(const Decode& params, int64_t first_row, const RowStats& stats, const Output& o) {
  const int num_rows = params.group_size * params.num_queries;
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row >= num_rows) continue;
    tile::store_row(params.o_parts + (first_row + row) * kValueDim, o, i);
    if (o.first_column() == 0)
      reinterpret_cast<tile::Float2*>(params.stats_parts)[first_row + row] = {stats.max[i], stats.sum[i]};
  }
}

// Count a part that is written. Whether it is the last one to arrive, which then sees what all the others wrote. By all.
CUFLASH_DEVICE bool arrives_last(int* arrivals, int num_parts) {
  int& is_last = *reinterpret_cast<int*>(merge_room());
  __syncthreads();  // the part is written, and the room is read
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = ptx::fetch_add(arrivals, 1) == num_parts - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Merge all parts of a sequence in their order: their rows follow each other from `first_row` on. By all.
CUFLASH_DEVICE void merge_parts(const Decode& params, const attention::BatchHead& heads, int64_t first_row, int num_parts,
                                float softmax_scale_log2, attention::SinkArgument sink) {
  constexpr int kVectors = kValueDim / 4;
  const int num_rows = params.group_size * params.num_queries;
  float* const weights = merge_room();
  const auto* const stats = reinterpret_cast<const tile::Float2*>(params.stats_parts) + first_row;
  __syncthreads();  // the room is read
  for (int row = threadIdx.x; row < num_rows; row += kThreads) {
    float highest = ptx::negative_infinity<float>(), sum = 0;
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) highest = fmaxf(highest, stats[part * num_rows + row].at[0]);
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
      const tile::Float2 of = stats[part * num_rows + row];
      const float weight = RowStats::weight(of.at[0], highest, softmax_scale_log2);
      weights[part * num_rows + row] = weight;
      sum += of.at[1] * weight;
    }
    weights[num_parts * num_rows + row] = finish_row(params, heads, row, highest, sum, softmax_scale_log2, sink);
  }
  __syncthreads();  // weights are there
  using Vector = tile::Vector<float>;
  const auto* const parts = reinterpret_cast<const Vector*>(params.o_parts) + first_row * kVectors;
  for (int at = threadIdx.x; at < num_rows * kVectors; at += kThreads) {
    const int row = at / kVectors, column = at % kVectors * 4;
    Vector o{};
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
      const Vector x = parts[part * num_rows * kVectors + at];
#pragma unroll
      for (int e = 0; e < 4; ++e) o.at[e] += weights[part * num_rows + row] * x.at[e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < params.cache.value_dim)
        tile::to_element(o.at[e] * weights[num_parts * num_rows + row], o_at(params, heads, row, column + e));
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm80_decode(const __grid_constant__ cuflash::attention::Decode params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const DivMod by_part = divmod(blockIdx.x, params.max_parts), by_head = divmod(by_part.quotient, params.cache.num_kv_heads);
  const int number = by_head.quotient, kv_head = by_head.remainder;
  const Sequence of = sequence(params, number);
  const Part part = part_of<kBlockKv>(params, of, by_part.remainder);
  if (part.number >= part.num_parts) return;
  if (!of.is_valid && threadIdx.x == 0) ptx::fetch_add(params.cache.num_faults, 1);
  const BatchHead heads{{number}, number, kv_head * params.group_size};
  const auto q = matrix<Element>(params.q, heads, heads.head, params.num_queries, params.cache.head_dim);
  const int num_rows = params.group_size * params.num_queries;
  tile::load_async<kThreads>(q_smem, tile::StackedRows<Element>{q, params.q.head_stride, num_rows});

  const int num_steps = (part.stop - part.start + kBlockKv - 1) / kBlockKv;  // none of an empty sequence
  CacheCopy copy(params, number, kv_head, of, part);
#pragma unroll
  for (int stage = 0; stage < kNumStages - 1; ++stage) {
    if (stage < num_steps) copy.start_next(stage);
    ptx::cp_async_commit();
  }
  const float softmax_scale_log2 = Softmax::scale_log2(params.softmax_scale);
  const int key_group = threadIdx.x / 32 / kRowGroups;
  RowStats stats;
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    stats.max[i] = ptx::negative_infinity<float>();
    stats.sum[i] = 0;
  }
  Output o;
  o.fill(0);
  int stage = 0, free_stage = kNumStages - 1;
  for (int step = 0; step < num_steps; ++step) {
    ptx::cp_async_wait<kNumStages - 2>();
    __syncthreads();  // the step's keys and values are there, those of the step before are read
    if (step + kNumStages - 1 < num_steps) copy.start_next(free_stage);
    ptx::cp_async_commit();
    Scores s;
    tile::gemm_nt(s, q_smem, k_smem(stage));
    if (Softmax::needs_negation(params.softmax_scale)) Softmax::negate(s, params.softmax_scale);
    const int start = part.start + step * kBlockKv;
    mask_rows<false>(s, KvBlock{start, min(start + kBlockKv, part.stop), BlockKind::kInterval, 0},
                     ptx::negative_infinity<float>(), [&](int row) { return packed_row_mask(params, of, row); });
    stats.update(s, o, softmax_scale_log2);
    tile::gemm_add_nn(o, s, WarpV{v_smem(stage).start + key_group * WarpV::kBytes});
    free_stage = stage;
    stage = stage + 1 == kNumStages ? 0 : stage + 1;
  }
  merge_warps(stats, o, softmax_scale_log2);
  if (part.num_parts == 1) {
    if (key_group == 0) write_results(params, heads, stats, o, softmax_scale_log2, sink);
    return;
  }
  const int64_t first_row = static_cast<int64_t>(by_part.quotient) * params.max_parts * num_rows;
  if (key_group == 0) write_part(params, first_row + part.number * num_rows, stats, o);
  int* const arrivals = params.arrivals + by_part.quotient;
  if (!arrives_last(arrivals, part.num_parts)) return;
  merge_parts(params, heads, first_row, part.num_parts, softmax_scale_log2, sink);
  if (threadIdx.x == 0) *arrivals = 0;  // for the next launch: no part of this one is left
}
