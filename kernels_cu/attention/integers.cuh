#pragma once
#include <attention/params.cuh>

// Integers of any type in the arrays of a mask.
namespace cuflash::attention {

constexpr int64_t kFar = 1LL << 62;  // beyond any key

// An integer of any type, ordered by value.
struct Integer {
  bool is_beyond;  // whether the value is 2^63 or more, which only a uint64 can be
  int64_t bits;

  CUFLASH_DEVICE bool operator==(const Integer& other) const {
    return is_beyond == other.is_beyond && bits == other.bits;
  }
  CUFLASH_DEVICE bool operator<(const Integer& other) const {
    return is_beyond == other.is_beyond ? bits < other.bits : other.is_beyond;
  }
};

// The integers of a batch entry.
struct Integers {
  const unsigned char* data;
  int64_t stride;
  int itemsize;
  bool is_signed;

  // Return an integer exactly.
  CUFLASH_DEVICE Integer exact(int number) const {
    if (itemsize == 8) {
      const int64_t bits = *reinterpret_cast<const int64_t*>(data + number * stride);
      return {!is_signed && bits < 0, bits};
    }
    return {false, at(number)};
  }

  // Return an integer as an int64. Integers of uint64 from 2^62 on become kFar.
  CUFLASH_DEVICE int64_t at(int number) const {
    const void* const from = data + number * stride;
    if (itemsize == 8) {
      const int64_t value = *static_cast<const int64_t*>(from);
      return is_signed || (value >= 0 && value < kFar) ? value : kFar;
    }
    // No conditional has an int32_t and a uint32_t as operands: it would return a negative int32_t as a uint32_t.
    if (itemsize == 4 && is_signed) return *static_cast<const int32_t*>(from);
    if (itemsize == 4) return *static_cast<const uint32_t*>(from);
    if (itemsize == 2) return is_signed ? *static_cast<const int16_t*>(from) : *static_cast<const uint16_t*>(from);
    return is_signed ? *static_cast<const int8_t*>(from) : *static_cast<const uint8_t*>(from);
  }
};

// Return the address of a batch entry's integers.
CUFLASH_DEVICE const unsigned char* integers_of(const int32_t* batch, const void* integers, const int64_t* strides,
                                                int batch_entry) {
  const unsigned char* data = static_cast<const unsigned char*>(integers);
  for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
    data += batch_entry % batch[axis] * strides[axis];
    batch_entry /= batch[axis];
  }
  return data;
}

}  // namespace cuflash::attention
