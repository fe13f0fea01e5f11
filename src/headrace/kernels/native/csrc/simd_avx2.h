// Sixteen lanes as two halves on AVX2 with FMA and F16C. See simd.h for what each name must do.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include <cstring>

namespace HR_ISA {

inline int32_t load32(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F abs(F a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F round(F a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store_f16(uint16_t* p, F a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 half_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_bf16(const uint16_t* p) { return {half_bf16(p), half_bf16(p + 8)}; }
inline F load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline void store_i8(int8_t* p, F a) {
  // packs works within 128-bit halves; the permutation puts the 16 bytes in order
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  words = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}
inline __m256 half_exp2i(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F exp2i(F n) { return {half_exp2i(n.lo), half_exp2i(n.hi)}; }
// Of 32 numbers in two vectors: the largest, the first that equals `value`, whether all are finite.
inline float max_of(F a, F b) {
  const __m256 m = _mm256_max_ps(_mm256_max_ps(a.lo, a.hi), _mm256_max_ps(b.lo, b.hi));
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline uint32_t equal_mask(__m256 a, __m256 v) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, v, _CMP_EQ_OQ)); }
inline int first_of(F a, F b, float value) {
  const __m256 v = _mm256_set1_ps(value);
  const uint32_t equal =
      equal_mask(a.lo, v) | equal_mask(a.hi, v) << 8 | equal_mask(b.lo, v) << 16 | equal_mask(b.hi, v) << 24;
  return equal ? __builtin_ctz(equal) : 31;
}
inline bool are_finite(F a, F b) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 sum = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(a.lo, zero), _mm256_mul_ps(a.hi, zero)),
                                   _mm256_add_ps(_mm256_mul_ps(b.lo, zero), _mm256_mul_ps(b.hi, zero)));
  return _mm256_movemask_ps(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q)) == 0;
}
// a where it is at least b, else 0
inline F keep_from(F a, F b) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), a.lo), _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ), a.hi)};
}
inline F without_lane(F a, int lane) {
  const __m256i at = _mm256_set1_epi32(lane), low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  return {_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(low, at)), a.lo),
          _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(high, at)), a.hi)};
}
// Stores 32 integral numbers as bytes and returns their sum.
inline int32_t store_sum_i8(int8_t* p, F a, F b) {
  store_i8(p, a);
  store_i8(p + 16, b);
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)p), one = _mm256_set1_epi16(1);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), sums = _mm256_madd_epi16(pairs, one);
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xB1)));
}
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

// Unsigned 4-bit weights: 15 * 127 * 2 per pair and 8 pairs stay below 32,768, so a whole group fits 16-bit sums.
struct Dot4 {
  using W = I;
  using A = I;
  static A zero(int) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static void unpack(const uint8_t* p, W& low, W& high) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
    low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
    high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
  }
  static A step(A a, W w, const int8_t* x) {
    const __m256i v = _mm256_set1_epi32(load32(x));
    return {_mm256_add_epi16(a.lo, _mm256_maddubs_epi16(w.lo, v)), _mm256_add_epi16(a.hi, _mm256_maddubs_epi16(w.hi, v))};
  }
  static I finish(A a) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a.lo, one), _mm256_madd_epi16(a.hi, one)};
  }
  // The weights of 16 outputs for one k of the group.
  static F column(const uint8_t* line, int32_t bits) {
    const __m256i shift = _mm256_set1_epi32(bits), mask = _mm256_set1_epi32(15), *half = (const __m256i*)line;
    return to_float({_mm256_and_si256(_mm256_srlv_epi32(_mm256_loadu_si256(half), shift), mask),
                     _mm256_and_si256(_mm256_srlv_epi32(_mm256_loadu_si256(half + 1), shift), mask)});
  }
};

// Signed 8-bit weights: the sign moves to x, so that maddubs has an unsigned side; 127 * 127 * 2 fits 16 bits.
struct Dot8 {
  using W = I;
  using A = I;
  static A zero(int) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static W unpack(const int8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  static __m256i half(__m256i a, __m256i w, __m256i v) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static A step(A a, W w, const int8_t* x) {
    const __m256i v = _mm256_set1_epi32(load32(x));
    return {half(a.lo, w.lo, v), half(a.hi, w.hi, v)};
  }
  static I finish(A a) { return a; }
  static F column(const int8_t* line, int32_t bits) {
    const __m256i shift = _mm256_set1_epi32(bits), *half = (const __m256i*)line;
    return to_float({_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_loadu_si256(half), shift), 24),
                     _mm256_srai_epi32(_mm256_sllv_epi32(_mm256_loadu_si256(half + 1), shift), 24)});
  }
};

// Vectors of values that attention sums at once, with up to 4 heads each: what the registers hold.
constexpr int kValueVectors = 1;
constexpr int kRowsAtOnce = 4;

}  // namespace HR_ISA
