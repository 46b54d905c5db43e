#pragma once
#include <sm90/gathered_queries.cuh>

// The copy warps of the producer warpgroup: they compute the row masks of a step, and copy the rows that TMA cannot
// copy.
namespace cuflash::sm90 {

// Return a word in which the bits lo <= x < hi are set.
CUFLASH_DEVICE uint32_t bit_range(int lo, int hi) { return ptx::bits_at_or_above(lo) & ~ptx::bits_at_or_above(hi); }

template <class Config>
struct QCopyWarps : GatheredQueries<Config> {
  using Base = GatheredQueries<Config>;
  using typename Base::ChosenArgument, typename Base::Element, typename Base::HeadWork, typename Base::PipelineState, typename Base::QueryStats,
      typename Base::SharedStorage, typename Base::StageQueries, typename Base::StepMessage;
  using Base::array_smem, Base::do_phase, Base::do_smem, Base::do_stage, Base::kBlockKv, Base::kBlockQ,
      Base::kClearsHiddenGradient, Base::kCopyThreads, Base::kDoStages, Base::kIsWide, Base::kKeyWords, Base::kNumStages, Base::kQueryWords,
      Base::k_phase, Base::k_smem, Base::kLargestPlainLse2, Base::load_operand, Base::q_smem, Base::shared, Base::v_smem, Base::visible_keys;

  static_assert(kIsWide || kBlockQ % kCopyThreads == 0,
                "every copy thread computes masks of the same number of queries");

  // Return a word for the 32 keys from `first` on, with a bit set for each key that a query sees; keys from `last` on
  // do not exist.
  static CUFLASH_DEVICE uint32_t row_mask_bits(const attention::RowMask& row_mask, int first, int last) {
    uint32_t bits = bit_range(row_mask.lo - first, min(row_mask.hi, last) - first);
    if (Config::kIsListed && row_mask.bits != nullptr) {
      uint32_t listed = 0;
#pragma unroll 1
      for (int key = 0; key < 32 && first + key < last; key += 8)
        listed |= static_cast<uint32_t>(row_mask.bits[(first + key - row_mask.first_bit_key) / 8]) << key;
      bits &= listed;
    }
    return bits;
  }

  // Compute the row masks of a step under a band. The queries that see a key form an interval, which moves by one query
  // from one key to the next.
  static CUFLASH_DEVICE void compute_band_masks(const attention::Params& params, const attention::WorkTile& work,
                                                const attention::KvBlock& block, StageQueries& queries, int thread) {
    using namespace attention;
    const bool is_full = block.kind == BlockKind::kFull;
    const int start = work.first - block.start;
    const int first = is_full ? -kBlockKv : clamped_to_int(start - params.work.upper);
    const int last = is_full ? kBlockQ : clamped_to_int(start - params.work.lower + 1);
#pragma unroll 1
    for (int key = thread; key < kBlockKv; key += kCopyThreads) {
      const int lo = first + key, hi = key < work.last - work.first ? min(last + key, block.stop - block.start) : 0;
#pragma unroll
      for (int x = 0; x < kQueryWords; ++x) queries.row_masks[key][x] = bit_range(lo - 32 * x, hi - 32 * x);
    }
  }

  // Compute the row masks of a step. Called by all copy warps.
  static CUFLASH_DEVICE void compute_row_masks(const attention::Params& params, attention::NoChosenLists,
                                               const HeadWork& work,
                                               const StepMessage& message, StageQueries& queries, int thread, int) {
    using namespace attention;
    if constexpr (!kIsWide)
      if (params.work.lo == nullptr && message.block.kind != BlockKind::kBits)
        return compute_band_masks(params, work.tile, message.block, queries, thread);
#pragma unroll 1
    // uniform trip count, since the threads of a warp exchange bits
    for (int first = 0; first < kBlockQ; first += kCopyThreads) {
      const int row = first + thread, query = message.block.start + row;
      if (kIsWide && row >= kBlockQ) break;
      const RowMask row_mask = message.block.row_mask(params, work.tile.batch_head, min(query, message.block.stop - 1));
#pragma unroll 1
      for (int x = 0; x < kKeyWords; ++x) {
        const uint32_t bits =
            query < message.block.stop ? row_mask_bits(row_mask, work.tile.first + 32 * x, work.tile.last) : 0;
        if constexpr (kIsWide) queries.row_masks[row][x] = bits;
        else queries.row_masks[32 * x + thread % 32][row / 32] = tile::transpose_bits_in_warp(bits);
      }
    }
  }

  // Store the statistics of a step's gathered queries. The statistics of other steps are copied together with Q. Called
  // by all copy warps.
  static CUFLASH_DEVICE void store_statistics(const attention::Params&, attention::NoChosenLists, const StepMessage&,
                                              int, int) {}
  static CUFLASH_DEVICE void store_statistics(const attention::Params& params, const attention::ChosenLists& chosen,
                                              const StepMessage& message, int stage, int row) {
    using namespace attention;
    static_assert(kBlockQ == kCopyThreads, "a copy thread has one row");
    const DivMod number_and_head = divmod(row, chosen.heads_per_tile);
    const bool in_bounds = number_and_head.quotient < message.block.stop - message.block.start;
    const int query = in_bounds ? shared().queries_of_steps[stage][number_and_head.quotient] : 0;
    const auto value = [&](const float* first, const Matrices& from) {
      return first[(in_bounds ? number_and_head.remainder : 0) * from.head_stride + query * from.row_stride];
    };
    const float lse = value(shared().parts[message.work].lse, params.lse),
                delta = value(shared().parts[message.work].delta, params.delta);
    QueryStats& stats = shared().queries[stage].stats;
    const float lse_2 = in_bounds ? lse_in_base_2(lse) : -ptx::negative_infinity<float>();
    stats.lse_2[row] = lse_2;
    stats.delta[row] = in_bounds ? delta : 0.0f;
    const bool is_large = lse_2 != -ptx::negative_infinity<float>() && fabsf(lse_2) > kLargestPlainLse2;
    const bool has_large = __any_sync(0xffffffffu, is_large);
    if (ptx::lane() == 0) (row < 32 ? stats.has_large_lse : stats.has_empty_rows) = has_large;
  }

  // Compute the row masks of a step of gathered queries. Called by all copy warps.
  static CUFLASH_DEVICE void compute_row_masks(const attention::Params& params, const attention::ChosenLists& chosen,
                                               const HeadWork& work, const StepMessage& message, StageQueries& queries,
                                               int row, int stage) {
    using namespace attention;
    const int number = divmod(row, chosen.heads_per_tile).quotient;
    const bool in_bounds = number < message.block.stop - message.block.start;
    const int query = in_bounds ? shared().queries_of_steps[stage][number] : 0;
    const Interval keys = interval(params, work.tile.batch_head, query);
    const int lo = keys.lo - work.tile.first, hi = in_bounds ? min(keys.hi, work.tile.last) - work.tile.first : 0;
#pragma unroll 1
    for (int x = 0; x < kKeyWords; ++x)
      queries.row_masks[32 * x + row % 32][row / 32] =
          tile::transpose_bits_in_warp(bit_range(lo - 32 * x, hi - 32 * x));
  }

  // Copy the gathered rows of Q or dO of a step that TMA cannot copy.
  template <class Tile>
  static CUFLASH_DEVICE void copy_queries(const attention::Params&, const attention::ChosenLists& chosen,
                                          const attention::Matrices& from, const StepMessage& message, int num_columns,
                                          Tile to, int row, int stage) {
    using namespace attention;
    const BatchHead& batch_head = shared().works[message.work].tile.batch_head;
    const DivMod query_and_head = divmod(row, chosen.heads_per_tile);
    const bool in_bounds = query_and_head.quotient < message.block.stop - message.block.start;
    const auto all =
        matrix<Element>(from, batch_head, batch_head.head + (in_bounds ? query_and_head.remainder : 0), 0, num_columns);
    const bool is_aligned = tile::has_aligned_chunks(all) && from.head_stride % tile::kChunkOf<Element> == 0;
    tile::copy_row(tile::TmaBoxes(to), row, all.row(in_bounds ? shared().queries_of_steps[stage][query_and_head.quotient] : 0), in_bounds,
                   num_columns, is_aligned, from.column_stride);
  }

  // Copy the rows of Q or dO of a step that TMA cannot copy. Rows of queries that see no key become 0.
  template <class Tile>
  static CUFLASH_DEVICE void copy_queries(const attention::Params& params, attention::NoChosenLists,
                                          const attention::Matrices& from, const StepMessage& message, int num_columns,
                                          Tile to, int thread, int) {
    using namespace attention;
    const BatchHead& batch_head = shared().works[message.work].tile.batch_head;
    const auto all = matrix<Element>(from, batch_head, batch_head.head, params.shape.seqlen_q, num_columns);
    // In tiles that are not wide, rows past the step are skipped below, which saves registers.
    const int last = kIsWide ? message.block.stop : message.block.start + kBlockQ;
    tile::copy<kCopyThreads>(tile::TmaBoxes(to), all.rows(message.block.start, last), thread, [&](int row) {
      return (kIsWide || row < message.block.stop - message.block.start) &&
             QueryStats::is_nonempty(message.nonempty, row);
    });
  }

  // Copy the elements of the staged array for a step into its slot. Called by all copy warps.
  template <class Score>
  static CUFLASH_DEVICE void load_array(const Score& score, const attention::WorkTile& work,
                                        const attention::KvBlock& block, int stage, int thread) {
    const auto part = staged_part(score, work.batch_head, {block.start, block.stop}, {work.first, work.last});
    tile::copy<kCopyThreads>(tile::TmaBoxes(array_smem(stage)), part, thread, [](int) { return true; });
  }

  // Set the elements of a stored gradient to 0 that a step clears. Called by all copy warps.
  template <class Score>
  static CUFLASH_DEVICE void clear_hidden_gradient_of_step(const attention::Params& params, const Score& score,
                                                           const attention::WorkTile& work, int first_query,
                                                           int thread) {
    const attention::Interval own = visited_queries<kBlockQ>(params, work.batch_head, work.first, work.last);
    const int num_steps = (own.hi - own.lo + kBlockQ - 1) / kBlockQ;
    clear_hidden_gradient<kCopyThreads, kBlockQ, kBlockKv>(params, score, work, (first_query - own.lo) / kBlockQ,
                                                           num_steps, thread);
  }

  // Run a copy warp: compute the row masks of each step, copy the operands that the step's message assigns to threads,
  // and start the copies of K and V.
  template <class Score>
  static CUFLASH_DEVICE void prepare_steps(const attention::Params& params, const TensorMaps& maps,
                                           const Score& score, ChosenArgument chosen) {
    using namespace attention;
    SharedStorage& smem = shared();
    const Shape& shape = params.shape;
    // recomputed at each use, like the following values, to save registers
    const auto thread = [] { return ptx::thread_index() - 32; };
    for (int number = 0;; number = number == 2 * kNumStages - 1 ? 0 : number + 1) {
      const PipelineState state{number % kNumStages, number / kNumStages};  // both are derived from one register
      ptx::mbarrier_wait(ptx::shared_address(&smem.message_ready[state.stage]), state.phase);
      const StepMessage& message = smem.messages[state.stage];
      if (message.is(StepMessage::kEndOfWork)) return tile::arrive(smem.q[state.stage].full);
      const auto work = [&]() -> const HeadWork& { return smem.works[message.work]; };
      store_statistics(params, chosen, message, state.stage, thread());
      if (message.is(StepMessage::kMasked))
        compute_row_masks(params, chosen, work(), message, smem.queries[state.stage], thread(), state.stage);
      if (message.is(StepMessage::kThreadsCopyQ))
        copy_queries(params, chosen, params.q, message, shape.head_dim, q_smem(state.stage), thread(), state.stage);
      if constexpr (kStagesArray)
        if (message.is(StepMessage::kThreadsCopyArray))
          load_array(score, work().tile, message.block, state.stage, thread());
      tile::arrive(smem.q[state.stage].full);
      if (message.is(StepMessage::kLoadsK)) {
        const WorkTile& tile = work().tile;
        const auto kv_head = [&] { return tile.batch_head.head / shape.group_size; };
        // Without this wait, one copy warp could arrive for this K while another one still copies the previous K.
        tile::wait_empty(smem.k, k_phase(message.flags));
        __syncwarp();
        if (thread() == 0) {
          load_operand(tile::TmaBoxes(k_smem), maps.k, message.k_coords, tile.first, smem.k,
                       message.is(StepMessage::kThreadsCopyK));
          if (message.is(StepMessage::kLoadsV))
            load_operand(tile::TmaBoxes(v_smem), maps.v, message.v_coords, tile.first, smem.v,
                         message.is(StepMessage::kThreadsCopyV));
        }
        if (message.is(StepMessage::kThreadsCopyK)) {
          const Interval keys = visible_keys(params, tile);
          ptx::compiler_barrier();  // keeps values from being computed earlier, to save registers
          const auto all = matrix<Element>(params.k, tile.batch_head, kv_head(), shape.seqlen_kv, shape.head_dim);
          tile::copy<kCopyThreads>(tile::TmaBoxes(k_smem), all.rows(tile.first, keys.hi), thread(),
                                   [&](int row) { return tile.first + row >= keys.lo; });
        }
        tile::arrive(smem.k.full);
        if (message.is(StepMessage::kThreadsCopyV)) {
          const auto all = matrix<Element>(params.v, tile.batch_head, kv_head(), shape.seqlen_kv, shape.value_dim);
          const auto is_row_valid = [](int) { return true; };
          tile::copy<kCopyThreads>(tile::TmaBoxes(v_smem), all.rows(tile.first, tile.last), thread(), is_row_valid);
        }
        if (message.is(StepMessage::kLoadsV)) tile::arrive(smem.v.full);
      }
      if constexpr (kDoStages < kNumStages)  // otherwise dO is released together with Q
        tile::wait_empty(smem.d_o[do_stage(state)], do_phase(state));
      if (message.is(StepMessage::kThreadsCopyDo))
        copy_queries(params, chosen, params.do_, message, shape.value_dim, do_smem(do_stage(state)), thread(),
                     state.stage);
      if constexpr (kClearsHiddenGradient)  // before the arrival, after which the message may change
        if (params.work.lo == nullptr)
          clear_hidden_gradient_of_step(params, score, work().tile, message.block.start, thread());
      tile::arrive(smem.d_o[do_stage(state)].full);
    }
  }
};

}  // namespace cuflash::sm90
