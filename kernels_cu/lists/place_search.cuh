#pragma once
#include <lists/row_choice.cuh>

// The next place to try in a search for the last chosen place of a row.
namespace cuflash::lists {

// Return the score, negated, of a place that is neither forced nor without eligibility.
CUFLASH_DEVICE float negated_score(uint32_t place) {
  const int32_t bits = static_cast<int32_t>(place ^ 0x80000000u);
  return __uint_as_float(static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)));
}

// Return a place between two others, which differ by at least 2: that of the score at a part of the way between their
// scores if there is one, else that part of the way between the places.
CUFLASH_DEVICE uint32_t place_between(uint32_t least, uint32_t end, float part = 0.5f) {
  const float score = (1.0f - part) * negated_score(least) + part * negated_score(end);
  const int32_t bits = static_cast<int32_t>(__float_as_uint(score + 0.0f));
  const uint32_t place = static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
  if (score == score && least < place && place < end) return place;
  const uint32_t way = static_cast<uint32_t>(part * static_cast<float>(end - least));
  return least + (way > 0 ? way : 1);
}

}  // namespace cuflash::lists
