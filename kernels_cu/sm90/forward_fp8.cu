// FlashAttention-3's FP8 forward pass (arXiv 2407.08608, section 3.3) on Hopper. Q, K and V are e4m3 with a scale for
// each block of rows. V is transposed, with its keys in the order in which a thread holds a row of P, so that weights
// stay in their lanes. The tensor cores sum P V over kStepsOfSum steps with a precision of 14 bits, and each sum is
// then added to O in float32. Weights are multiplied by V while the scores of the next step become weights. There is no
// ping-pong between warpgroups: a step spends more time on softmax than on products, so ping-pong would cost 1 to 2 %
// at 128 columns. Blocks take further tiles until none is left.
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <attention/softmax_fp8.cuh>
#include <sm90/forward_fp8_epilogue.cuh>
#include <sm90/forward_hooks.cuh>
#include <sm90/forward_tiles.cuh>
#include <sm90/kv_pipeline.cuh>

namespace cuflash::sm90 {

struct ForwardFp8 : ForwardFp8Epilogue<Config> {
  static constexpr bool kIsWide = kValueDim > 64 && kMinBlocks == 1;  // consumers need nearly all registers
  static constexpr int kProducerRegisters = kIsWide ? 24 : 40;
  static constexpr int kConsumerRegisters = kIsWide ? 240 : kMinBlocks == 1 ? 232 : 216;
  static_assert(kThreads == kWarpgroupThreads * (1 + kNumConsumers), "a warpgroup has 64 rows");

  // Return the scales of an operand's rows in one head.
  static CUFLASH_DEVICE const float* scales_of_head(const attention::Matrices& scales,
                                                    const attention::BatchHead& batch_head, int head) {
    return attention::matrix<float>(scales, batch_head, head, 0, 1).data;
  }
  // Return the scale of a row, from the scales of its head.
  static CUFLASH_DEVICE float scale_of_row(const float* of_head, const attention::Matrices& scales, int row,
                                           int64_t rows_of_a_scale) {
    const int rows = static_cast<int>(rows_of_a_scale);
    // in the first case, which is the usual one, the compiler replaces the division by a shift
    return of_head[(rows == kBlockKv ? row / kBlockKv : row / rows) * scales.row_stride];
  }

  // The functions of this kernel that the producer warps (sm90/kv_pipeline.cuh) call to read and store scales.
  struct Fp8Hooks : ForwardHooks<Config> {
    struct ScalesOfStep {
      float key, value;
    };

    // Return the scales of a step, to the elected thread.
    static CUFLASH_DEVICE ScalesOfStep read_scales(ScalesArgument scales, const WorkTileInfo& tile_info, int first_key,
                                                   bool is_first) {
      if (!is_first_lane()) return {};
      StepScales& of_tile = step_scales();
      if (is_first) {
        of_tile.of_keys = scales_of_head(scales.k_scale, tile_info.work.batch_head, tile_info.kv_head);
        of_tile.of_values = scales_of_head(scales.v_scale, tile_info.work.batch_head, tile_info.kv_head);
      }
      return {scale_of_row(of_tile.of_keys, scales.k_scale, first_key, scales.k_rows),
              scale_of_row(of_tile.of_values, scales.v_scale, first_key, scales.v_rows)};
    }

    // Store the scales of a step. The products with the step's values are added to the sum of the previous step if that
    // sum has few steps and a similar scale.
    static CUFLASH_DEVICE void store_scales(const ScalesOfStep& scales, int stage, bool is_first) {
      if (!is_first_lane()) return;
      StepScales& written = step_scales();
      const auto [key, value] = scales;
      const float value_log2 = ptx::log2_approx(value), shift = value_log2 - written.sum_scale_log2;
      const bool starts = is_first || written.num_steps_of_sum == kStepsOfSum || !(fabsf(shift) <= kLargestShift);
      written.steps[stage] = {key, starts ? 0 : shift, starts ? 1 : ptx::exp2_approx(-shift),
                              !starts    ? -1
                              : is_first ? 0
                                         : written.sum_scale};
      if (starts) {
        written.sum_scale = value;
        written.sum_scale_log2 = value_log2;
      }
      written.num_steps_of_sum = starts ? 1 : written.num_steps_of_sum + 1;
      written.sum_scales[stage] = written.sum_scale;
    }
  };

  using VOperand = tile::KMajor<SmemV>;

  // Store the factors of the scores of a thread's rows, without the scale of keys.
  static CUFLASH_DEVICE void read_row_scales(ScalesArgument scales, unsigned num_tiles_done) {
    const attention::WorkTile& work = shared().tile_infos[tile_info_index(num_tiles_done)].work;
    const float* const of_head = scales_of_head(scales.q_scale, work.batch_head, work.batch_head.head);
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const int row = min(work.first + Scores::first_row() + Scores::row(i), work.last - 1);
      thread_state().row_scales[i] =
          shared().softmax_scale_log2 * scale_of_row(of_head, scales.q_scale, row, scales.q_rows);
    }
  }

  // Multiply the scores of a tile's first step, wait for them, and return the flags of the step.
  static CUFLASH_DEVICE int start_first_scores(Scores& s, int group, unsigned num_tiles_done, unsigned num_k_blocks) {
    tile::wait_full(shared().k[stage_of(num_k_blocks)], phase_of(num_k_blocks));
    const int flags = flags_of_warpgroup(group, num_k_blocks);
    tile::start_gemm_nt(s, q_operand(group, num_tiles_done), KOperand(k_smem(stage_of(num_k_blocks))));
    tile::wait_wgmma<0>(s);
    return flags;
  }

  // Skip the rest of a tile, whose keys the warpgroup's queries do not see: release K and V.
  static CUFLASH_DEVICE void skip_blocks(int group, unsigned& num_k_blocks) {
    for (bool is_end = false; !is_end; ++num_k_blocks) {
      const int stage = stage_of(num_k_blocks), phase = phase_of(num_k_blocks);
      tile::wait_full(shared().k[stage], phase);
      is_end = flags_of_warpgroup(group, num_k_blocks) & StepMessage::kLastOfTile;
      tile::arrive(shared().k[stage].empty);
      tile::wait_full(shared().v[stage], phase);
      tile::arrive(shared().v[stage].empty);
    }
  }

  // Convert an element of Q or K to float. Its bits, shifted, are those of a float that is smaller by a factor of
  // 2^120, except for NaN.
  static CUFLASH_DEVICE float e4m3_to_float(const uint8_t* e4m3) {
    const uint32_t bits = *e4m3;
    const float x = __uint_as_float((bits & 0x7f) << 20 | (bits & 0x80) << 24) * 0x1p120f;
    return fabsf(x) > 448 ? __uint_as_float(0x7fc00000u) : x;
  }
  // Return the address of an element in a swizzled tile.
  template <class Tile>
  static CUFLASH_DEVICE const uint8_t* element_address(Tile tile, int row, int column) {
    const auto panel = tile.panel(column / Tile::kPanelWidth);
    const int at = column % Tile::kPanelWidth;
    return panel.template pointer<uint8_t>(panel.offset(row, at / 16)) + at % 16;
  }
  // Multiply the scores of a step again, from the numbers in shared memory, for one warp whose scores have been
  // overwritten.
  static CUFLASH_DEVICE void recompute_scores(Scores& s, unsigned num_tiles_done, unsigned num_k_blocks) {
    const SmemQ q = q_smem(q_stage_of(num_tiles_done));
    const SmemK k = k_smem(stage_of(num_k_blocks));
    s.fill(0);
#pragma unroll 1  // executed rarely, so the code is kept short
    for (int column = 0; column < kHeadDim; ++column) {
      const int at = ptx::opaque(column);  // opaque, so that no address stays in a register
      float query[Scores::kRows];
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i)
        query[i] = e4m3_to_float(element_address(q, s.first_row() + s.row(i), at));
      const uint8_t* const keys[2] = {element_address(k, s.first_column(), at),
                                      element_address(k, s.first_column() + 1, at)};
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {  // the swizzle repeats after eight rows
        const float key = e4m3_to_float(keys[j % 2] + j / 2 * 8 * SmemK::kRowBytes);
#pragma unroll
        for (int i = 0; i < Scores::kRows; ++i) s.at(i, j) = ptx::fma(query[i], key, s.at(i, j));
      }
    }
  }

  // Add sum * scale to o.
  static CUFLASH_DEVICE void add_scaled(Output& o, Output& sum, float scale) {
#pragma unroll
    for (int i = 0; i < Output::kRows; ++i)
#pragma unroll
      for (int j = 0; j < Output::kColumns; ++j) o.at(i, j) = ptx::fma(sum.at(i, j), scale, o.at(i, j));
  }

  // Factors of a step's scores and weights.
  struct StepFactors {
    RowScales scale, row_shift;

    // Read the factors. K of the step must have arrived.
    explicit CUFLASH_DEVICE StepFactors(const Softmax& softmax, unsigned num_k_blocks) {
      const StepScales::Step& step = step_scales().steps[stage_of(num_k_blocks)];
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) {
        scale[i] = thread_state().row_scales[i] * step.key;
        row_shift[i] = softmax.row_shift(i, step.shift);
      }
    }

    // Return whether all scales of the warp are positive. A scale may be NaN, or a product that rounds to 0.
    CUFLASH_DEVICE bool are_positive() const {
      bool is_positive = true;
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) is_positive &= scale[i] > 0;
      return __all_sync(0xffffffffu, is_positive);
    }

    // Multiply scores by their scales, so that scores that are masked later are -inf whatever their scales are. If each
    // score were compared with -inf before its exponential instead, steps with 64 columns would take 20 % longer, since
    // ptxas would copy scores between registers (experiments/results/decisions_fp8.csv).
    CUFLASH_DEVICE void apply_scale(Scores& s) {
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) {
        s.scale_row(i, scale[i]);
        scale[i] = 1;
      }
    }
  };

  // Operands of the products that a step starts. They are computed before the step's weights are ready, so that little
  // work remains before the products start.
  class NextOperands {
   public:
    NextOperands() = default;
    CUFLASH_DEVICE NextOperands(int group, unsigned num_tiles_done, unsigned num_k_blocks)
        : q_(q_operand(group, num_tiles_done)),
          k_(k_smem(stage_of(num_k_blocks))),
          v_(v_smem(stage_of(num_k_blocks - 1))) {
      q_.descriptor.materialize();
      k_.descriptor.materialize();
      v_.descriptor.materialize();
    }

    // Return kOperandsArrived if the operands have arrived, and 0 otherwise.
    static CUFLASH_DEVICE int arrival_flag(unsigned num_k_blocks) {
      const bool has_k = tile::try_wait_full(shared().k[stage_of(num_k_blocks)], phase_of(num_k_blocks)),
                 has_v = tile::try_wait_full(shared().v[stage_of(num_k_blocks - 1)], phase_of(num_k_blocks - 1));
      return has_k && has_v ? StepMessage::kOperandsArrived : 0;
    }

    // Start the scores of the next step, and the product of the weights with V, which is added to the sum unless the
    // step starts a new sum. `flags` are those of the step. `meanwhile` is called between the two.
    template <class Meanwhile>
    CUFLASH_DEVICE void start(Scores& s, Output& values, const PackedP& p, int group, unsigned num_k_blocks, bool adds,
                              int flags, Meanwhile meanwhile) const {
      if (!(flags & StepMessage::kOperandsArrived)) {
        tile::wait_full(shared().k[stage_of(num_k_blocks)], phase_of(num_k_blocks));
        tile::wait_full(shared().v[stage_of(num_k_blocks - 1)], phase_of(num_k_blocks - 1));
      }
      ptx::fence_registers(tile::accumulators(values));  // reads of the registers must stay before this line
      tile::start_gemm_nt(s, q_, k_);
      meanwhile();
      tile::start_gemm_nt(values, p, v_, adds);
    }

   private:
    QOperand q_;
    KOperand k_;
    VOperand v_;
  };

  // Multiply a tile's last weights by V; there is no further step whose scores could be multiplied at the same time.
  static CUFLASH_DEVICE void multiply_last_values(Output& values, const PackedP& p, unsigned num_k_blocks, bool adds) {
    const int stage = stage_of(num_k_blocks);
    tile::wait_full(shared().v[stage], phase_of(num_k_blocks));
    tile::start_gemm_nt(values, p, VOperand(v_smem(stage)), adds);
    tile::wait_wgmma<0>(values);
  }

  // Multiply a tile's last weights by V, and the first scores of the next tile. Return the flags of the next tile's
  // first step.
  static CUFLASH_DEVICE int multiply_next_tile(Scores& s, Output& values, const PackedP& p, int group,
                                               unsigned num_tiles_done, unsigned num_k_blocks, bool adds) {
    NextOperands(group, num_tiles_done, num_k_blocks).start(s, values, p, group, num_k_blocks, adds, 0, [] {});
    const int flags = flags_of_warpgroup(group, num_k_blocks);
    tile::wait_wgmma<0>(values);
    tile::wait_wgmma<0>(s);
    return flags;
  }

  // Multiply the rows of O, and of the sum that is not yet part of O, by factors.
  static CUFLASH_DEVICE void rescale(Output& o, Output& values, const float (&factor)[Softmax::kRows]) {
#pragma unroll
    for (int i = 0; i < Output::kRows; ++i) {
      o.scale_row(i, factor[i]);
      values.scale_row(i, factor[i]);
    }
  }

  // Run a consumer warpgroup, tile after tile. If the warpgroup takes part in all steps of a tile, the first scores of
  // the next tile are multiplied before the results of this one are written.
  static CUFLASH_DEVICE void consume_tiles(const attention::Params& params, const TensorMaps& maps, int group,
                                           SinkArgument sink, ScalesArgument scales) {
    unsigned num_k_blocks = 0;
    Scores s;
    int flags = 0;
    bool has_scores = false;
    for (unsigned num_tiles_done = 0; has_scores || wait_tile(num_tiles_done); ++num_tiles_done) {
      Softmax softmax(thread_state().row_max);
      Output o, values;  // values: the sum over steps that are not yet part of O
      PackedP p;
      o.fill(0);
      values.fill(0);
      if (!has_scores) {
        read_row_scales(scales, num_tiles_done);
        flags = start_first_scores(s, group, num_tiles_done, num_k_blocks);
      }
      StepFactors factors(softmax, num_k_blocks);
      constexpr int kPlainFlags = StepMessage::kUnmasked | StepMessage::kSkipMax;
      while (true) {
        const int stage = stage_of(num_k_blocks);
        const StepScales::Step& step = step_scales().steps[stage];
        const bool is_plain = (flags & kPlainFlags) == kPlainFlags;
        NextOperands next;
        float sum[Softmax::kRows], ended_scale;
        const auto meanwhile = [&] {  // called once the last products with V have ended
          tile::wait_wgmma<0>(values);
          if (flags & StepMessage::kValuesPending) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);
          ended_scale = step.ended_scale;
          next = NextOperands(group, num_tiles_done, num_k_blocks + 1);
          flags |= NextOperands::arrival_flag(num_k_blocks + 1);
        };
        if (is_plain && softmax.try_exp_with_stale_max(s, factors.scale, factors.row_shift, sum, meanwhile, p)) {
          softmax.add_sums(sum, step.unshift);
        } else {
          float factor[Softmax::kRows];
          bool max_has_risen = is_plain && softmax.lower_weights(s, step.unshift, sum, factor);
          if (!max_has_risen) {
            if (is_plain) recompute_scores(s, num_tiles_done, num_k_blocks);
            if (!(flags & StepMessage::kUnmasked)) {
              if (!factors.are_positive()) factors.apply_scale(s);
              negate_and_mask(params, s, num_tiles_done, num_k_blocks, chosen);
            }
            const Softmax::Rise rise = softmax.update_max(s, factors.scale, factor);
            max_has_risen = rise != Softmax::kHasNotRisen;
            if (max_has_risen && __all_sync(0xffffffffu, rise == Softmax::kHasMaximum)) flags |= StepMessage::kSkipMax;
            softmax.exp_scores(s, factors.scale, step.shift, step.unshift);
          }
          if (!is_plain) meanwhile();
          p = s;
          if (max_has_risen) rescale(o, values, factor);
        }
        if (!(ended_scale < 0)) add_scaled(o, values, ended_scale);  // also if the scale is NaN
        ++num_k_blocks;
        if (flags & StepMessage::kLastForWarpgroup) {
          const bool is_last_of_tile = flags & StepMessage::kLastOfTile, adds = ended_scale < 0;
          const float value_scale = step_scales().sum_scales[stage];
          tile::arrive(shared().k[stage].empty);
          has_scores = is_last_of_tile && wait_tile(num_tiles_done + 1);
          if (has_scores) flags = multiply_next_tile(s, values, p, group, num_tiles_done + 1, num_k_blocks, adds);
          else multiply_last_values(values, p, num_k_blocks - 1, adds);
          tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);
          add_scaled(o, values, value_scale);
          if (!is_last_of_tile) skip_blocks(group, num_k_blocks);
          epilogue(params, maps, num_tiles_done, softmax, o, sink);
          tile::arrive(shared().q[q_stage_of(num_tiles_done)].empty);
          if (has_scores) read_row_scales(scales, num_tiles_done + 1);
          break;
        }
        next.start(s, values, p, group, num_k_blocks, ended_scale < 0, flags, [&] {
          tile::arrive(shared().k[stage].empty);
          flags =
              StepMessage::kValuesPending | (flags & StepMessage::kSkipMax) | flags_of_warpgroup(group, num_k_blocks);
          factors = StepFactors(softmax, num_k_blocks);
        });
        tile::wait_wgmma<1>(s);
      }
    }
    if (kStoresOByTma) ptx::bulk_wait_read<0>();
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const TensorMaps& maps, SinkArgument sink,
                                 PagesArgument pages, ScalesArgument scales, const score::Function& score_function,
                                 StagedMapArgument staged_map) {
    // uniform in the warp, so that branches do not diverge
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
    if (threadIdx.x == 0) {
      init_barriers();
      shared().softmax_scale_log2 = LazySoftmax<Scores::kRows>::scale_log2(params.shape.softmax_scale);
    }
    __syncthreads();
    if (group == 0) {
      if constexpr (kReallocatesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
      produce<Fp8Hooks>(params, maps, sink, pages, scales, score_function, staged_map, chosen);
    } else {
      if constexpr (kReallocatesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume_tiles(params, maps, group, sink, scales);
    }
  }
};

constexpr int kSharedBytes = ForwardFp8::kSharedBytes;

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::ForwardFp8::kThreads, cuflash::Config::kMinBlocks)
sm90_forward_fp8(const __grid_constant__ cuflash::attention::Params params,
                 const __grid_constant__ cuflash::sm90::TensorMaps maps CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  ForwardFp8::run(params, maps, sink, pages, scales, score_function, staged_map);
}
