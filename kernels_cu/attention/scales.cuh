#pragma once
#include <attention/feature_argument.cuh>
#include <attention/params.cuh>

// Scales of FP8 operands: a kernel argument, in kernels whose specification is quantized.
namespace cuflash::attention {

// A scale for each run of rows of q, k and v, from row 0 on. planning/families/sm90_fp8.py has the same record.
struct Scales {
  Matrices q_scale, k_scale, v_scale;  // float32, with one column
  int64_t q_rows, k_rows, v_rows;  // number of rows that share a scale
};

struct NoScales {};
template <class Config>
using ScalesArgument = FeatureArgument<Config::kIsQuantized, Scales, NoScales>;
constexpr NoScales scales{};

}  // namespace cuflash::attention
