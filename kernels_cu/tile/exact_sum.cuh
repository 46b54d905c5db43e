#pragma once
#include <ptx/atomic.cuh>
#include <ptx/math.cuh>

// Sums in global memory without rounding errors, to which many thread blocks add: fixed-point numbers wide enough for
// every finite number of a type, like a superaccumulator (U. Kulisch, "Computer Arithmetic and Validity", 2008).
// Additions of integers give the same sum in any order.
namespace cuflash::tile {

constexpr int kDigitBits = 24;  // bits of a digit

// The fields of a floating-point type.
template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int kMantissaBits = 23, kExponentBits = 8;
  static CUFLASH_DEVICE uint64_t bits(float x) { return __float_as_uint(x); }
};
template <>
struct FloatFormat<double> {
  static constexpr int kMantissaBits = 52, kExponentBits = 11;
  static CUFLASH_DEVICE uint64_t bits(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }
};

// The words of a sum: digits in units of the least subnormal number, the lowest first, then the counts of NaN, +inf and
// -inf among the terms. A word has room for 2^39 digits of one sign.
template <class T>
struct ExactSum {
  using Format = FloatFormat<T>;
  static constexpr int kMaxExponent = (1 << Format::kExponentBits) - 1;
  static constexpr int kNumDigits = (kMaxExponent - 1 + Format::kMantissaBits + kDigitBits) / kDigitBits;
  static constexpr int kNumWords = kNumDigits + 3;
  static constexpr int kLeastExponent = 2 - (1 << (Format::kExponentBits - 1)) - Format::kMantissaBits;

  // Add 32 bits to the digits, starting at a bit position.
  static CUFLASH_DEVICE void add_bits(int64_t* words, int position, uint32_t bits, bool is_negative) {
    uint64_t rest = static_cast<uint64_t>(bits) << position % kDigitBits;
    for (int digit = position / kDigitBits; rest != 0; ++digit, rest >>= kDigitBits) {
      const int64_t value = static_cast<int64_t>(rest & ((1u << kDigitBits) - 1));
      if (value != 0) ptx::red_add(words + digit, is_negative ? -value : value);
    }
  }

  // Add a number to a sum, atomically word by word.
  static CUFLASH_DEVICE void add(int64_t* words, T x) {
    const uint64_t bits = Format::bits(x), mantissa = bits & ((uint64_t{1} << Format::kMantissaBits) - 1);
    const int exponent = static_cast<int>(bits >> Format::kMantissaBits) & kMaxExponent;
    const bool is_negative = bits >> (Format::kMantissaBits + Format::kExponentBits) & 1;
    if (exponent == kMaxExponent) {
      ptx::red_add(words + kNumDigits + (mantissa != 0 ? 0 : is_negative ? 2 : 1), int64_t{1});
      return;
    }
    const uint64_t significand = mantissa | static_cast<uint64_t>(exponent != 0) << Format::kMantissaBits;
    const int position = exponent == 0 ? 0 : exponent - 1;
    add_bits(words, position, static_cast<uint32_t>(significand), is_negative);
    if (Format::kMantissaBits >= 32)
      add_bits(words, position + 32, static_cast<uint32_t>(significand >> 32), is_negative);
  }

  // Return the sum rounded to T, with an error of at most two units in the last place; equal words always give equal
  // bits.
  static CUFLASH_DEVICE T rounded(const int64_t* words) {
    const int64_t num_nan = words[kNumDigits], num_inf = words[kNumDigits + 1],
                  num_negative_inf = words[kNumDigits + 2];
    const T negative_infinity = ptx::negative_infinity<T>();
    if (num_nan != 0 || (num_inf != 0 && num_negative_inf != 0)) return negative_infinity - negative_infinity;
    if (num_inf != 0 || num_negative_inf != 0) return num_inf != 0 ? -negative_infinity : negative_infinity;
    const bool is_negative = carry_out(words, 1) < 0;
    const int sign = is_negative ? -1 : 1;
    const int64_t highest = carry_out(words, sign);
    int top = highest != 0 ? kNumDigits : 0;
    for_digits(words, sign, [&](int digit, int64_t value) {
      if (value != 0) top = max(top, digit);
    });
    // Digits below the fourth from the top do not change any bit of a double.
    const int lowest = max(top - 3, 0);
    double sum = 0, unit = 1;
    for_digits(words, sign, [&](int digit, int64_t value) {
      if (digit < lowest || digit > top) return;
      sum += static_cast<double>(value) * unit;
      unit *= 1 << kDigitBits;
    });
    if (top == kNumDigits) sum += static_cast<double>(highest) * unit;
    const int exponent = kDigitBits * lowest + kLeastExponent, first = min(max(exponent, -1000), 900);
    sum = sum * power_of_two(first) * power_of_two(exponent - first);
    return ptx::rounded_to<T>(is_negative ? -sum : sum);
  }

 private:
  // Call visit(digit, value) for each digit of `sign` times the sum, after carries, with values from 0 to 2^24 - 1.
  // Return the last carry.
  template <class Visit>
  static CUFLASH_DEVICE int64_t for_digits(const int64_t* words, int sign, Visit visit) {
    int64_t carry = 0;
    for (int digit = 0; digit < kNumDigits; ++digit) {
      const int64_t value = sign * words[digit] + carry;
      carry = value >> kDigitBits;
      visit(digit, value - (carry << kDigitBits));
    }
    return carry;
  }
  // Return the last carry, which is negative if `sign` times the sum is negative.
  static CUFLASH_DEVICE int64_t carry_out(const int64_t* words, int sign) {
    return for_digits(words, sign, [](int, int64_t) {});
  }
  static CUFLASH_DEVICE double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
  }
};

}  // namespace cuflash::tile
