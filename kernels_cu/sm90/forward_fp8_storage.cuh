#pragma once
#include <attention/softmax_fp8.cuh>
#include <sm90/forward_tiles.cuh>

// The register tiles and shared memory that only sm90_forward_fp8 has, in addition to those of sm90/forward_tiles.cuh
// and sm90/kv_storage.cuh.
namespace cuflash::sm90 {

template <class Config>
struct ForwardFp8Storage : ForwardTiles<Config> {
  using Base = ForwardTiles<Config>;
  using typename Base::Element, typename Base::Scores, typename Base::SharedStorage;
  using Base::kBlockKv, Base::kBlockQ, Base::kNumConsumers, Base::kNumStages, Base::kStorageOffset, Base::kValueDim;

  using PackedP = tile::E4M3Operand<Scores>;
  using Softmax = attention::QuantizedSoftmax<Scores::kRows>;
  using RowScales = float[Scores::kRows];
  static constexpr int kStepsOfSum = 512 / kBlockKv;  // maximum number of steps in a sum: 512 keys, as in fp8/cuts.py
  // weights absorb a ratio of a step's scale to the sum's scale of at most 2 to this power
  static constexpr float kLargestShift = 1;

  // The scales of steps, stored next to the messages.
  struct alignas(16) StepScales {
    struct alignas(16) Step {
      float key;
      float shift, unshift;  // log2 of the ratio of the values' scale to their sum's scale; 2^-shift
      float ended_scale;  // scale of the sum that ends before the step; negative if the step continues the sum
    };
    Step steps[kNumStages];
    // Only the producer uses these: the scales of the tile's K and V, and the sum that contains the last step.
    const float *of_keys, *of_values;
    float sum_scale, sum_scale_log2;
    int num_steps_of_sum;
    float sum_scales[kNumStages];  // for each step: scale of the sum that contains its values
  };
  // State of a consumer thread in shared memory, which saves registers: the scales and the maxima of its rows.
  struct alignas(16) ThreadState {
    float row_scales[2], row_max[2];
  };
  static constexpr int kStepScalesOffset = (kStorageOffset + static_cast<int>(sizeof(SharedStorage)) + 15) / 16 * 16;
  static CUFLASH_DEVICE StepScales& step_scales() {
    return *reinterpret_cast<StepScales*>(ptx::dynamic_shared<unsigned char>() + kStepScalesOffset);
  }
  static constexpr bool kStoresOByTma = sizeof(Element) == 2;
  static constexpr int kThreadStatesOffset = (kStepScalesOffset + static_cast<int>(sizeof(StepScales)) + 15) / 16 * 16;
  static CUFLASH_DEVICE ThreadState& thread_state() {
    const int number = ptx::thread_index() - kWarpgroupThreads;
    return reinterpret_cast<ThreadState*>(ptx::dynamic_shared<unsigned char>() + kThreadStatesOffset)[number];
  }
  static constexpr int kThreadStatesEnd =
      kThreadStatesOffset + kNumConsumers * kWarpgroupThreads * static_cast<int>(sizeof(ThreadState));
  static constexpr int kSmemOOffset = (kThreadStatesEnd + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes =
      kSmemOOffset + (kStoresOByTma ? kBlockQ * kValueDim * static_cast<int>(sizeof(Element)) : 0);
};

}  // namespace cuflash::sm90
