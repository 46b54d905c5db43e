#pragma once

// Kernel arguments that only kernels with a feature have, such as dropout, a sink or a cache.
namespace cuflash::attention {

template <bool Has, class Record, class Absent>
struct FeatureArgumentIf {
  using Type = const Record&;
};
template <class Record, class Absent>
struct FeatureArgumentIf<false, Record, Absent> {
  using Type = Absent;
};

// The type of a feature's argument in functions: kernels without the feature pass a constant of type Absent.
template <bool Has, class Record, class Absent>
using FeatureArgument = typename FeatureArgumentIf<Has, Record, Absent>::Type;

}  // namespace cuflash::attention
