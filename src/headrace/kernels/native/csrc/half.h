// fp16 and bf16 to float and back, without special instructions: for packing, and for processors that lack F16C.
#pragma once
#include <cstdint>
#include <cstring>

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float bfloat_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000 | mantissa << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = (float)mantissa * (1.0f / 16777216.0f);  // subnormal: mantissa * 2^-24
  return sign ? -small : small;
}

// Rounds to nearest, ties to even, as the processor's conversion does.
inline uint16_t float_to_half(float f) {
  const uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000, magnitude = u & 0x7FFFFFFF;
  if (magnitude >= 0x7F800000) return (uint16_t)(sign | 0x7C00 | (magnitude > 0x7F800000 ? 0x200 : 0));
  if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // rounds to infinity
  if (magnitude < 0x38800000) {                                    // subnormal in half
    const float scaled = bits_to_float(magnitude) + 0.5f;          // 2^-24 units land in the low mantissa bits
    return (uint16_t)(sign | (float_to_bits(scaled) - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return (uint16_t)(sign | (rounded - 0x38000000) >> 13);
}
