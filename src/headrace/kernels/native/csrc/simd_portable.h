// Sixteen lanes as plain arrays, for processors without AVX2. See simd.h for what each name must do.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace HR_ISA {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};

template <class Op>
inline F map(Op op) {
  F r;
  for (int i = 0; i < 16; i++) r.v[i] = op(i);
  return r;
}
inline F load(const float* p) { return map([&](int i) { return p[i]; }); }
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
inline F set1(float a) { return map([&](int) { return a; }); }
inline F add(F a, F b) { return map([&](int i) { return a.v[i] + b.v[i]; }); }
inline F sub(F a, F b) { return map([&](int i) { return a.v[i] - b.v[i]; }); }
inline F mul(F a, F b) { return map([&](int i) { return a.v[i] * b.v[i]; }); }
inline F div(F a, F b) { return map([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F max(F a, F b) { return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F abs(F a) { return map([&](int i) { return std::fabs(a.v[i]); }); }
inline F round(F a) { return map([&](int i) { return std::nearbyintf(a.v[i]); }); }
inline F load_f16(const uint16_t* p) { return map([&](int i) { return half_to_float(p[i]); }); }
inline void store_f16(uint16_t* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = float_to_half(a.v[i]);
}
inline F load_bf16(const uint16_t* p) { return map([&](int i) { return bfloat_to_float(p[i]); }); }
inline F load_i8(const int8_t* p) { return map([&](int i) { return (float)p[i]; }); }
inline void store_i8(int8_t* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = (int8_t)std::nearbyintf(a.v[i]);
}
inline F exp2i(F n) { return map([&](int i) { return std::ldexp(1.0f, (int)n.v[i]); }); }
// Of 32 numbers in two vectors: the largest, the first that equals `value`, whether all are finite.
inline float max_of(F a, F b) {
  float top = a.v[0];
  for (int i = 0; i < 16; i++) top = std::fmax(top, std::fmax(a.v[i], b.v[i]));
  return top;
}
inline int first_of(F a, F b, float value) {
  for (int i = 0; i < 31; i++)
    if ((i < 16 ? a.v[i] : b.v[i - 16]) == value) return i;
  return 31;
}
inline bool are_finite(F a, F b) {
  for (int i = 0; i < 16; i++)
    if (!std::isfinite(a.v[i]) || !std::isfinite(b.v[i])) return false;
  return true;
}
// a where it is at least b, else 0
inline F keep_from(F a, F b) { return map([&](int i) { return a.v[i] >= b.v[i] ? a.v[i] : 0.0f; }); }
inline F without_lane(F a, int lane) {
  return map([&](int i) { return i == lane ? 0.0f : a.v[i]; });
}
// Stores 32 integral numbers as bytes and returns their sum.
inline int32_t store_sum_i8(int8_t* p, F a, F b) {
  store_i8(p, a);
  store_i8(p + 16, b);
  int32_t sum = 0;
  for (int i = 0; i < 32; i++) sum += p[i];
  return sum;
}
inline F to_float(I a) { return map([&](int i) { return (float)a.v[i]; }); }

struct Bytes {
  int8_t v[64];
};
inline I dot(I a, const Bytes& w, const int8_t* x) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) a.v[i] += (int32_t)w.v[4 * i + j] * x[j];
  return a;
}
struct Dot4 {
  using W = Bytes;
  using A = I;
  static A zero(int) { return I{}; }
  static void unpack(const uint8_t* p, W& low, W& high) {
    for (int i = 0; i < 64; i++) {
      low.v[i] = (int8_t)(p[i] & 15);
      high.v[i] = (int8_t)(p[i] >> 4);
    }
  }
  static A step(A a, const W& w, const int8_t* x) { return dot(a, w, x); }
  static I finish(A a) { return a; }
  static F column(const uint8_t* line, int32_t shift) {
    return map([&](int i) { return (float)(line[4 * i + shift / 8] >> shift % 8 & 15); });
  }
};
struct Dot8 {
  using W = Bytes;
  using A = I;
  static A zero(int) { return I{}; }
  static W unpack(const int8_t* p) {
    W w;
    std::memcpy(w.v, p, 64);
    return w;
  }
  static A step(A a, const W& w, const int8_t* x) { return dot(a, w, x); }
  static I finish(A a) { return a; }
  static F column(const int8_t* line, int32_t shift) {
    return map([&](int i) { return (float)line[4 * i + 3 - shift / 8]; });
  }
};

// Vectors of values that attention sums at once, with up to 4 heads each: what the registers hold.
constexpr int kValueVectors = 1;
constexpr int kRowsAtOnce = 2;

}  // namespace HR_ISA
