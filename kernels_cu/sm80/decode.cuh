// Attention of a few new tokens to the keys and values of a cache (split-KV decoding: Flash-Decoding, T. Dao et al., 2023).
// A block works on a part of one sequence's keys for one key/value head, with the queries of all heads that share it as rows
// of one tile. Its warps share keys, not rows: each has its own softmax, and they merge at the end. How a sequence is cut into
// parts follows from its own length alone, and parts are merged in their order by whichever block ends last: results of a
// sequence have the same bits whoever else is in the batch, and wherever its pages lie.
//
// A kernel names how a stage holds keys and values, a type with
//   Arrays                 what the kernel takes beside its parameters
//   KTile, VTile, Stored   tiles of keys and values, and the type of their elements
//   kThreadsPerRow         that share the copy of a row
//   kBytes                 of a stage, a multiple of 128; a stage is made of the byte where it starts
//   start_scales           copy what else sixteen rows have; by the first of the warps that share them
//   queries                of the warp, once they are in shared memory
//   multiply, add          scores of the stage's keys, and its values times their weights
//   column, store_row      where the output's columns are
#pragma once
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
using Softmax = attention::LazySoftmax<Scores::kRows>;  // of its scale alone: its maxima are those of a whole warp
static_assert(kRowGroups * kKeyGroups == kNumWarps && kKeysOfWarp % 16 == 0 && kBlockKv % 16 == 0, "warps share evenly");

constexpr QTile q_smem{0};
template <class Stage>
CUFLASH_DEVICE Stage stage_smem(int number) {
  static_assert(Stage::kBytes % 128 == 0, "chunks of a row are told apart by their addresses");
  return {QTile::kBytes + number * Stage::kBytes};
}
CUFLASH_DEVICE int key_group() { return threadIdx.x / 32 / kRowGroups; }
// Wait for the warps that read the same keys.
CUFLASH_DEVICE void sync_key_group() {
  if constexpr (kRowGroups == 1) __syncwarp();
  else __syncthreads();
}

// In the place of queries, keys and values, once all of them are read.
constexpr int kFloatsOfWarp = Output::kColumnTiles * 4 * 32;
constexpr int kStatsFloats = 2 * kKeyGroups * kBlockQ;
constexpr int kMergeFloats = kStatsFloats + kKeyGroups / 2 * kRowGroups * kFloatsOfWarp;
constexpr int kMostParts = 128;
constexpr int kPartsFloats = (2 * kMostParts + 1) * kBlockQ;
CUFLASH_DEVICE float* merge_room() { return ptx::dynamic_shared<float>(); }

// The rows of K and V that a warp reads, and copies with the other warps that read them, so that no others have to wait. As pages
// have a multiple of sixteen rows, sixteen keys lie in one page, which is looked up one step ahead of their copies.
template <class Stage>
class CacheCopy {
 public:
  CUFLASH_DEVICE CacheCopy(const Decode& params, const typename Stage::Arrays& arrays, int sequence, int kv_head,
                           const Sequence& of, const Part& part)
      : cache_(params.cache), arrays_(arrays), sequence_(sequence), kv_head_(kv_head), first_key_(of.first_key),
        stop_(part.stop), next_(part.start + key_group() * kKeysOfWarp),
        k_(first_chunk_of<KTile>(cache_.k, kv_head)), v_(first_chunk_of<VTile>(cache_.v, kv_head)),
        table_(cache_.table == nullptr ? nullptr : cache_.table + static_cast<int64_t>(sequence) * cache_.max_pages) {
    const attention::DivMod first = attention::divmod(next_, cache_.page_size),
                            step = attention::divmod(kBlockKv, cache_.page_size);
    number_ = first.quotient;
    row_ = first.remainder;
    pages_of_step_ = step.quotient;
    rows_of_step_ = step.remainder;
    look_up();
  }

  // Start to copy the next step's rows; zeros in the place of rows that are not the part's.
  CUFLASH_DEVICE void start_next(int number) {
    const Stage stage = stage_smem<Stage>(number);
    const int first = next_;
    int pages[kUnits], rows[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      pages[unit] = pages_[unit];
      rows[unit] = rows_[unit];
    }
    next_ += kBlockKv;
    look_up();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int position = first + unit * kUnit, page = pages[unit];
      const bool is_page = page >= 0 && page < cache_.num_pages;
      const bool is_part = position + kUnit > first_key_ && position < stop_;
      if (is_part && !is_page && thread() == 0) ptx::fetch_add(cache_.num_faults, 1);
      // Rows of the unit: none where it has no page.
      const int first_row = is_page ? first_key_ - position : kUnit, last_row = is_page ? stop_ - position : 0;
      const int64_t from_page = is_page ? page : 0;
      const int to = key_group() * kKeysOfWarp + unit * kUnit;
      copy_rows(stage.keys(), to, k_ + from_page * cache_.k.batch_strides[0] + rows[unit] * cache_.k.row_stride,
                cache_.k.row_stride, cache_.head_dim, first_row, last_row);
      copy_rows(stage.values(), to, v_ + from_page * cache_.v.batch_strides[0] + rows[unit] * cache_.v.row_stride,
                cache_.v.row_stride, cache_.value_dim, first_row, last_row);
      if (thread() < 32)
        stage.start_scales(arrays_, to, {{static_cast<int>(from_page)}, 0, kv_head_}, rows[unit], first_row, last_row);
    }
  }

 private:
  using Stored = typename Stage::Stored;
  using KTile = typename Stage::KTile;
  using VTile = typename Stage::VTile;
  static constexpr int kUnit = 16, kUnits = kKeysOfWarp / kUnit;
  static constexpr int kRowsOfThreads = 32 * kRowGroups / Stage::kThreadsPerRow;
  static constexpr int kRowsPerPass = kRowsOfThreads < kUnit ? kRowsOfThreads : kUnit;

  // Of those that copy the same keys.
  static CUFLASH_DEVICE int thread() { return threadIdx.x % (32 * kRowGroups); }
  static CUFLASH_DEVICE int own_row() { return thread() / Stage::kThreadsPerRow; }
  static CUFLASH_DEVICE int own_chunk() { return thread() % Stage::kThreadsPerRow; }
  template <class Tile>
  static CUFLASH_DEVICE const Stored* first_chunk_of(const attention::Matrices& matrices, int head) {
    return static_cast<const Stored*>(matrices.data) + head * matrices.head_stride + own_row() * matrices.row_stride +
           own_chunk() * Tile::kChunk;
  }

  CUFLASH_DEVICE void look_up() {
    int number = number_, row = row_;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      pages_[unit] = sequence_;
      if (table_ != nullptr && next_ + unit * kUnit < stop_) pages_[unit] = table_[number];
      rows_[unit] = row;
      advance(number, row, 0, kUnit);
    }
    advance(number_, row_, pages_of_step_, rows_of_step_);
  }
  // Pages and rows are counted, since dividing by the size of a page takes longer than a copy.
  CUFLASH_DEVICE void advance(int& number, int& row, int pages, int rows) const {
    number += pages;
    row += rows;
    if (row < cache_.page_size) return;
    row -= cache_.page_size;
    ++number;
  }

  // Copy a thread's chunks of sixteen rows, of which first_row <= x < last_row are there.
  template <class Tile>
  static CUFLASH_DEVICE void copy_rows(Tile tile, int to, const Stored* from, int64_t row_stride, int num_columns,
                                       int first_row, int last_row) {
    static_assert(Tile::kChunks % Stage::kThreadsPerRow == 0, "threads copy as many chunks");
    if (kRowsOfThreads > kRowsPerPass && own_row() >= kRowsPerPass) return;
    const uint32_t start = tile.address(to + own_row(), own_chunk());
#pragma unroll
    for (int row = 0; row < kUnit; row += kRowsPerPass) {
      const bool is_there = own_row() + row >= first_row && own_row() + row < last_row;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; chunk += Stage::kThreadsPerRow) {
        const bool is_copied = is_there && (own_chunk() + chunk) * Tile::kChunk < num_columns;
        ptx::cp_async_cg_16(Tile::advanced(start, row, chunk), from + (is_copied ? row * row_stride + chunk * Tile::kChunk : 0),
                            is_copied ? 16 : 0);
      }
    }
  }

  const attention::CachePages& cache_;
  const typename Stage::Arrays& arrays_;
  const int sequence_, kv_head_, first_key_, stop_;
  int next_;  // the position of the warp's first key in the next step
  const Stored *const k_, *const v_;
  const int32_t* const table_;  // of the sequence
  int number_, row_;            // of a page in the table, and in the page: of the key that is looked up next
  int pages_of_step_, rows_of_step_;
  int pages_[kUnits], rows_[kUnits];
};

// Maximum and sum of a thread's rows, in the units of q k^T; each row's follow from its own scores alone.
struct RowStats {
  float max[Scores::kRows], sum[Scores::kRows];

  static CUFLASH_DEVICE float shift(float max) { return max == ptx::negative_infinity<float>() ? 0 : max; }
  static CUFLASH_DEVICE float weight(float max, float to, float softmax_scale_log2) {
    return ptx::exp2_approx((max - shift(to)) * softmax_scale_log2);
  }

  // Scores become weights, and what has been summed before is scaled by what the maximum rose. The lower eight rows of the tile
  // stay as they are where there is no query in them.
  CUFLASH_DEVICE void update(Scores& s, Output& o, float softmax_scale_log2, bool has_lower_rows) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      if (i % 2 == 1 && !has_lower_rows) continue;
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
      if (__any_sync(0xffffffffu, factor != 1)) o.scale_row(i, factor);  // once maxima are found, they rarely rise
    }
  }
};

// Merge what the warps that share keys have; those of the first keys get it all.
CUFLASH_DEVICE void merge_warps(RowStats& stats, Output& o, float softmax_scale_log2) {
  const int own_group = key_group(), row_group = threadIdx.x / 32 % kRowGroups;
  float* const maxima = merge_room();
  float* const sums = maxima + kKeyGroups * kBlockQ;
  ptx::cp_async_wait<0>();
  __syncthreads();  // queries, keys and values are read
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int at = own_group * kBlockQ + o.first_row() + o.row(i);
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
    const int slot = own_group % half * kRowGroups + row_group;
    float* const room = merge_room() + kStatsFloats + slot * kFloatsOfWarp + 4 * ptx::lane();
    if (own_group >= half && own_group < 2 * half) Layout::store_shared(room, o);
    __syncthreads();  // what others add is there
    if (own_group < half) Layout::add_shared(room, o, 0, Output::kColumnTiles);
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
template <class Stage>
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
      const int column = Stage::column(o, j);
      if (column < params.cache.value_dim) tile::to_element(o.at(i, j), o_at(params, heads, row, column));
    }
  }
}

// What a part leaves to be merged. By the warps that hold it.
template <class Stage>
CUFLASH_DEVICE void write_part(const Decode& params, int64_t first_row, const RowStats& stats, const Output& o) {
  const int num_rows = params.group_size * params.num_queries;
#pragma unroll
  for (int i = 0; i < Output::kRows; ++i) {
    const int row = o.first_row() + o.row(i);
    if (row >= num_rows) continue;
    Stage::store_row(params.o_parts + (first_row + row) * kValueDim, o, i);
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

// Merge all parts of a sequence in their order: their rows follow each other from `first_row` on. A thread's first parts are
// read before their weights are known. By all.
CUFLASH_DEVICE void merge_parts(const Decode& params, const attention::BatchHead& heads, int64_t first_row, int num_parts,
                                float softmax_scale_log2, attention::SinkArgument sink) {
  using Vector = tile::Vector<float>;
  constexpr int kVectors = kValueDim / 4, kAhead = kNumWarps > 4 ? 8 : 16;  // more warps have fewer registers each
  const int own = threadIdx.x;
  const int num_rows = params.group_size * params.num_queries, num_vectors = num_rows * kVectors;
  float* const weights = merge_room();  // maxima before
  float* const sums = weights + kMostParts * kBlockQ;
  float* const factors = sums + kMostParts * kBlockQ;
  const auto* const stats = reinterpret_cast<const tile::Float2*>(params.stats_parts) + first_row;
  const auto* const parts = reinterpret_cast<const Vector*>(params.o_parts) + first_row * kVectors;
  Vector ahead[kAhead];
#pragma unroll
  for (int part = 0; part < kAhead; ++part)
    if (part < num_parts && own < num_vectors) ahead[part] = parts[part * num_vectors + own];
  __syncthreads();  // the room is read
  for (int at = own; at < num_parts * num_rows; at += kThreads) {
    const tile::Float2 of = stats[at];
    weights[at] = of.at[0];
    sums[at] = of.at[1];
  }
  __syncthreads();  // maxima and sums are there
  for (int row = own; row < num_rows; row += kThreads) {
    float highest = ptx::negative_infinity<float>(), sum = 0;
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) highest = fmaxf(highest, weights[part * num_rows + row]);
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
      const float weight = RowStats::weight(weights[part * num_rows + row], highest, softmax_scale_log2);
      weights[part * num_rows + row] = weight;
      sum += sums[part * num_rows + row] * weight;
    }
    factors[row] = finish_row(params, heads, row, highest, sum, softmax_scale_log2, sink);
  }
  __syncthreads();  // weights are there
  for (int at = own; at < num_vectors; at += kThreads) {
    const int row = at / kVectors, column = at % kVectors * 4;
    Vector o{};
    const auto add = [&](int part, const Vector& x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o.at[e] += weights[part * num_rows + row] * x.at[e];
    };
    int part = 0;
    if (at == own) {
#pragma unroll
      for (; part < kAhead; ++part)
        if (part < num_parts) add(part, ahead[part]);
    }
#pragma unroll 8
    for (; part < num_parts; ++part) add(part, parts[part * num_vectors + at]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < params.cache.value_dim)
        tile::to_element(o.at[e] * factors[row], o_at(params, heads, row, column + e));
  }
}

// All of a kernel.
template <class Stage>
CUFLASH_DEVICE void decode(const Decode& params, const typename Stage::Arrays& arrays, attention::SinkArgument sink) {
  using namespace attention;
  constexpr int kSharedFloats = (QTile::kBytes + kNumStages * Stage::kBytes) / 4;
  static_assert(kMergeFloats <= kSharedFloats, "there is room for what is merged");
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
  ptx::cp_async_commit();

  const int num_steps = (part.stop - part.start + kBlockKv - 1) / kBlockKv;  // none of an empty sequence
  CacheCopy<Stage> copy(params, arrays, number, kv_head, of, part);
#pragma unroll 1  // a text that is loaded once
  for (int stage = 0; stage < kNumStages - 1; ++stage) {
    if (stage < num_steps) copy.start_next(stage);
    ptx::cp_async_commit();
  }
  const float softmax_scale_log2 = Softmax::scale_log2(params.softmax_scale);
  const bool has_lower_rows = kRowGroups > 1 || num_rows > 8;
  const Interval seen = seen_by_all(params, of);
  RowStats stats;
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    stats.max[i] = ptx::negative_infinity<float>();
    stats.sum[i] = 0;
  }
  Output o;
  o.fill(0);
  ptx::cp_async_wait<kNumStages - 1>();
  __syncthreads();  // queries are there
  const auto queries = Stage::queries();
  int stage = 0, free_stage = kNumStages - 1;
  for (int step = 0; step < num_steps; ++step) {
    ptx::cp_async_wait<kNumStages - 2>();
    sync_key_group();  // the step's keys and values are there, those of the step before are read
    if (step + kNumStages - 1 < num_steps) copy.start_next(free_stage);
    ptx::cp_async_commit();
    Scores s;
    stage_smem<Stage>(stage).multiply(s, queries);
    if (Softmax::needs_negation(params.softmax_scale)) Softmax::negate(s, params.softmax_scale);
    const int start = part.start + step * kBlockKv, stop = min(start + kBlockKv, part.stop);
    if (start < seen.lo || start + kBlockKv > min(seen.hi, part.stop))
      mask_rows<false>(s, KvBlock{start, stop, BlockKind::kInterval, 0}, ptx::negative_infinity<float>(),
                       [&](int row) { return packed_row_mask(params, of, row); });
    stats.update(s, o, softmax_scale_log2, has_lower_rows);
    stage_smem<Stage>(stage).add(o, s);
    free_stage = stage;
    stage = stage + 1 == kNumStages ? 0 : stage + 1;
  }
  merge_warps(stats, o, softmax_scale_log2);
  if (part.num_parts == 1) {
    if (key_group() == 0) write_results<Stage>(params, heads, stats, o, softmax_scale_log2, sink);
    return;
  }
  const int64_t first_row = static_cast<int64_t>(by_part.quotient) * params.max_parts * num_rows;
  if (key_group() == 0) write_part<Stage>(params, first_row + part.number * num_rows, stats, o);
  int* const arrivals = params.arrivals + by_part.quotient;
  if (!arrives_last(arrivals, part.num_parts)) return;
  merge_parts(params, heads, first_row, part.num_parts, softmax_scale_log2, sink);
  if (threadIdx.x == 0) *arrivals = 0;  // for the next launch: no part of this one is left
}

}  // namespace cuflash
