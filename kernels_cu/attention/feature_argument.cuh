#pragma once
#include <tile/conditional.cuh>

// Kernel arguments that only kernels with a feature have, such as dropout, a sink or a cache.
namespace cuflash::attention {

// The type of a function's parameter for the argument of a feature. Kernels without the feature pass a constant of type
// Absent.
template <bool Has, class Record, class Absent>
using FeatureArgument = tile::Conditional<Has, const Record&, Absent>;

}  // namespace cuflash::attention
