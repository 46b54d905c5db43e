#pragma once

// Types that depend on a constant.
namespace cuflash::tile {

template <bool IsFirst, class First, class Second>
struct ConditionalType {
  using Type = First;
};
template <class First, class Second>
struct ConditionalType<false, First, Second> {
  using Type = Second;
};

// The type First if `IsFirst`, else the type Second.
template <bool IsFirst, class First, class Second>
using Conditional = typename ConditionalType<IsFirst, First, Second>::Type;

}  // namespace cuflash::tile
