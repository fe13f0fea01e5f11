// Sixteen lanes on AVX-512 with VNNI. See simd.h for what each name must do.
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

using F = __m512;
using I = __m512i;

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F set1(float a) { return _mm512_set1_ps(a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_f16(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline void store_i8(int8_t* p, F a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
// 2^n for integral n in [-126, 127]
inline F exp2i(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// Of 32 numbers in two vectors: the largest, the first that equals `value`, whether all are finite.
inline float max_of(F a, F b) { return _mm512_reduce_max_ps(_mm512_max_ps(a, b)); }
inline int first_of(F a, F b, float value) {
  const F v = _mm512_set1_ps(value);
  const uint32_t equal = _mm512_cmpeq_ps_mask(a, v) | (uint32_t)_mm512_cmpeq_ps_mask(b, v) << 16;
  return equal ? __builtin_ctz(equal) : 31;
}
inline bool are_finite(F a, F b) {
  const F zero = _mm512_add_ps(_mm512_mul_ps(a, _mm512_setzero_ps()), _mm512_mul_ps(b, _mm512_setzero_ps()));
  return _mm512_cmpunord_ps_mask(zero, zero) == 0;
}
// a where it is at least b, else 0
inline F keep_from(F a, F b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), a); }
inline F without_lane(F a, int lane) { return _mm512_maskz_mov_ps((__mmask16)(lane >= 0 && lane < 16 ? ~(1u << lane) : ~0u), a); }
// Stores 32 integral numbers as bytes and returns their sum.
inline int32_t store_sum_i8(int8_t* p, F a, F b) {
  const I x = _mm512_cvtps_epi32(a), y = _mm512_cvtps_epi32(b);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x));
  _mm_storeu_si128((__m128i*)(p + 16), _mm512_cvtsepi32_epi8(y));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(x, y));
}
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }

// Dot products of 16 outputs with 4 k each: unsigned 4-bit weights.
struct Dot4 {
  using W = I;
  using A = I;
  static A zero(int) { return _mm512_setzero_si512(); }
  static void unpack(const uint8_t* p, W& low, W& high) {
    const I mask = _mm512_set1_epi8(15), w = _mm512_loadu_si512(p);
    low = _mm512_and_si512(w, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
  }
  static A step(A a, W w, const int8_t* x) { return _mm512_dpbusd_epi32(a, w, _mm512_set1_epi32(load32(x))); }
  static I finish(A a) { return a; }
  // The weights of 16 outputs for one k of the group.
  static F column(const uint8_t* line, int32_t shift) {
    const I w = _mm512_srlv_epi32(_mm512_loadu_si512(line), _mm512_set1_epi32(shift));
    return _mm512_cvtepi32_ps(_mm512_and_si512(w, _mm512_set1_epi32(15)));
  }
};

// Signed 8-bit weights: dpbusd wants one unsigned side, so 128 is added to the weights and 128 * sum(x) taken off.
struct Dot8 {
  using W = I;
  using A = I;
  static A zero(int x_sum) { return _mm512_set1_epi32(-128 * x_sum); }
  static W unpack(const int8_t* p) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8((char)0x80)); }
  static A step(A a, W w, const int8_t* x) { return _mm512_dpbusd_epi32(a, w, _mm512_set1_epi32(load32(x))); }
  static I finish(A a) { return a; }
  static F column(const int8_t* line, int32_t shift) {
    const I w = _mm512_sllv_epi32(_mm512_loadu_si512(line), _mm512_set1_epi32(shift));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(w, 24));
  }
};

// Vectors of values that attention sums at once, with up to 4 heads each: what the registers hold.
constexpr int kValueVectors = 4;
constexpr int kRowsAtOnce = 8;

}  // namespace HR_ISA
