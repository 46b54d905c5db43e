#pragma once

// No score function: what kernels have whose specification has none. Where it has one, what cuflash/compiler/score_text.py
// prints of it stands in the place of this file, and `score_function` is an argument of the kernel.
namespace cuflash {

constexpr bool kHasScore = false;

namespace score {
struct Function {
  using Number = config::Accumulator;
  static constexpr bool kIsDerived = false, kAddsGradients = false, kReadsAtPositions = false, kIsShift = false,
                        kSlopesNeedScore = false, kIsStaged = false, kCanBeUniform = false, kStoresGradient = false;
};
}  // namespace score

constexpr score::Function score_function{};

}  // namespace cuflash
