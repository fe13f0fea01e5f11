// The kernels, written once over sixteen lanes; each instruction set's file includes its simd_*.h and then this.
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace HR_ISA {
using namespace hr;

// Sum and maximum of the lanes, halves first: one order.
inline float sum_lanes(F a) {
  float v[16];
  store(v, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] = v[i] + v[i + half];
  return v[0];
}
inline float max_lanes(F a) {
  float v[16];
  store(v, a);
  for (int i = 1; i < 16; i++) v[0] = v[i] > v[0] ? v[i] : v[0];
  return v[0];
}

// A few floats at the end of a row, as a full vector padded with `fill`.
inline F load_part(const float* p, int n, float fill) {
  float v[16];
  for (int i = 0; i < 16; i++) v[i] = i < n ? p[i] : fill;
  return load(v);
}
inline void store_part(float* p, int n, F a) {
  float v[16];
  store(v, a);
  std::memcpy(p, v, sizeof(float) * n);
}
template <class Fn>
inline void each(int width, const float* x, float* y, Fn fn) {
  int i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, fn(load(x + i), i, 16));
  if (i < width) store_part(y + i, width - i, fn(load_part(x + i, width - i, 0), i, width - i));
}

// e^x by range reduction to [-ln2/2, ln2/2] and a polynomial (Cephes expf coefficients). max and min answer with their
// second operand where one is NaN: so NaN stays NaN.
inline F exp(F x) {
  x = min(set1(88.0f), max(set1(-87.0f), x));
  const F n = round(mul(x, set1(1.44269504088896341f)));
  const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return mul(add(fma(mul(r, r), p, r), set1(1.0f)), exp2i(n));
}
inline F tanh(F x) {  // 1 - 2 / (e^2x + 1)
  const F e = exp(mul(x, set1(2.0f)));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

// What is smaller counts as zero, since one over it would be infinite.
constexpr float kTiny = 1e-36f;
constexpr float kOutlier = 2;  // times the others of its group

void quantize(Rows x, int cols, const Quantized& out, int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    QuantizedGroup* group = out.at(r);
    const int m = r % kRowBlock;
    for (int at = 0; at < cols; at += kGroup, group++) {
      const float* p = x.row(r) + at;
      const int left = cols - at;
      F a = left >= 16 ? load(p) : load_part(p, left, 0);
      F b = left >= 32 ? load(p + 16) : load_part(p + 16, left > 16 ? left - 16 : 0, 0);
      const F size_a = abs(a), size_b = abs(b);
      const int k = first_of(size_a, size_b, max_of(size_a, size_b));
      const F others_a = without_lane(a, k), others_b = without_lane(b, k - 16);
      const float largest = k < left ? p[k] : 0.0f, second = max_of(abs(others_a), abs(others_b));
      const bool has_outlier = std::fabs(largest) > kOutlier * second;
      if (has_outlier) {
        a = others_a;
        b = others_b;
      }
      const float outlier = has_outlier ? largest : 0.0f, top = has_outlier ? second : std::fabs(largest);
      // A broken row must end as NaN, not as plausible numbers.
      const bool is_sound = are_finite(a, b) && std::isfinite(largest);
      const F inverse = set1(is_sound && top > kTiny ? 127.0f / top : 0.0f);
      const int32_t sum_q =
          is_sound ? store_sum_i8(group->q[m], round(mul(a, inverse)), round(mul(b, inverse))) : 0;
      const float scale = is_sound ? top / 127.0f : NAN;
      group->scale[m] = scale;
      group->outlier[m] = outlier;
      group->has_outlier[m] = has_outlier;
      group->sum[m] = scale * (float)sum_q + outlier;
      group->sum_q[m] = sum_q;
      group->line4[m] = k % 16 / 4;
      group->shift4[m] = 8 * (k % 4) + k / 16 * 4;
      group->line8[m] = k / 4;
      group->shift8[m] = 24 - 8 * (k % 4);
    }
  }
}

inline void finish_tile(F acc, int row, int tile, int rows, Rows y, const float* bias, const Rows* residual) {
  const int at = tile * kTile, n = rows - at;
  float* out = y.row(row) + at;
  if (n >= kTile) {
    if (bias) acc = add(acc, load(bias + at));
    if (residual) acc = add(acc, load(residual->row(row) + at));
    store(out, acc);
  } else {
    if (bias) acc = add(acc, load_part(bias + at, n, 0));
    if (residual) acc = add(acc, load_part(residual->row(row) + at, n, 0));
    store_part(out, n, acc);
  }
}

// Whether any of M rows has an outlier. Of those that have none it is 0 and adds nothing, so a row's bits do not depend on
// the answer.
template <int M>
inline bool have_outlier(const QuantizedGroup& group, int first) {
  bool any = false;
  for (int m = 0; m < M; m++) any |= group.has_outlier[first + m];
  return any;
}

template <int M>
inline void tile_w4(const Weight& w, int tile, int row, const Quantized& x, F* acc) {
  const Block4* block = (const Block4*)w.tile(tile);
  const QuantizedGroup* group = x.at(row);
  const int first = row % kRowBlock;
  for (int m = 0; m < M; m++) acc[m] = set1(0);
  for (int g = 0; g < w.groups; g++, block++, group++) {
    typename Dot4::A sums[M];
    for (int m = 0; m < M; m++) sums[m] = Dot4::zero(0);
    const bool has_outlier = have_outlier<M>(*group, first);
    const int8_t* q = group->q[first];
    for (int line = 0; line < 4; line++) {
      typename Dot4::W low, high;
      Dot4::unpack(block->q[line], low, high);
      for (int m = 0; m < M; m++) {
        sums[m] = Dot4::step(sums[m], low, q + m * kGroup + 4 * line);
        sums[m] = Dot4::step(sums[m], high, q + m * kGroup + 16 + 4 * line);
      }
    }
    const F scale = load_f16(block->scale), minimum = load_f16(block->min);
    for (int m = 0; m < M; m++) {
      const int i = first + m;
      F part = mul(to_float(Dot4::finish(sums[m])), set1(group->scale[i]));
      if (has_outlier)
        part = fma(Dot4::column(block->q[group->line4[i]], group->shift4[i]), set1(group->outlier[i]), part);
      acc[m] = fma(minimum, set1(group->sum[i]), fma(part, scale, acc[m]));
    }
  }
}

template <int M>
inline void tile_w8(const Weight& w, int tile, int row, const Quantized& x, F* acc) {
  const Block8* block = (const Block8*)w.tile(tile);
  const QuantizedGroup* group = x.at(row);
  const int first = row % kRowBlock;
  for (int m = 0; m < M; m++) acc[m] = set1(0);
  for (int g = 0; g < w.groups; g++, block++, group++) {
    typename Dot8::A sums[M];
    for (int m = 0; m < M; m++) sums[m] = Dot8::zero(group->sum_q[first + m]);
    const bool has_outlier = have_outlier<M>(*group, first);
    const int8_t* q = group->q[first];
    for (int line = 0; line < 8; line++) {
      const typename Dot8::W weights = Dot8::unpack(block->q[line]);
      for (int m = 0; m < M; m++) sums[m] = Dot8::step(sums[m], weights, q + m * kGroup + 4 * line);
    }
    const F scale = load_f16(block->scale);
    for (int m = 0; m < M; m++) {
      const int i = first + m;
      F part = mul(to_float(Dot8::finish(sums[m])), set1(group->scale[i]));
      if (has_outlier)
        part = fma(Dot8::column(block->q[group->line8[i]], group->shift8[i]), set1(group->outlier[i]), part);
      acc[m] = fma(part, scale, acc[m]);
    }
  }
}

template <int M, class Load>
inline void tile_float(const Weight& w, int tile, int row, Rows x, F* acc, size_t itemsize, Load load_line) {
  for (int m = 0; m < M; m++) acc[m] = set1(0);
  const uint8_t* line = w.tile(tile);
  for (int k = 0; k < w.cols; k++, line += kTile * itemsize) {
    const F weights = load_line(line);
    for (int m = 0; m < M; m++) acc[m] = fma(weights, set1(x.row(row + m)[k]), acc[m]);
  }
}

template <int M>
inline void tile_any(const Weight& w, int tile, int row, const Quantized* xq, Rows x, F* acc) {
  switch (w.kind) {
    case WeightKind::w4: return tile_w4<M>(w, tile, row, *xq, acc);
    case WeightKind::w8: return tile_w8<M>(w, tile, row, *xq, acc);
    case WeightKind::f16:
      return tile_float<M>(w, tile, row, x, acc, 2, [](const uint8_t* p) { return load_f16((const uint16_t*)p); });
    case WeightKind::bf16:
      return tile_float<M>(w, tile, row, x, acc, 2, [](const uint8_t* p) { return load_bf16((const uint16_t*)p); });
    case WeightKind::f32:
      return tile_float<M>(w, tile, row, x, acc, 4, [](const uint8_t* p) { return load((const float*)p); });
  }
}

template <int M>
inline void rows_of_tile(const Weight& w, int tile, int row, const Quantized* xq, Rows x, Rows y, const float* bias,
                         const Rows* residual) {
  F acc[M];
  tile_any<M>(w, tile, row, xq, x, acc);
  for (int m = 0; m < M; m++) finish_tile(acc[m], row + m, tile, w.rows, y, bias, residual);
}

// Rows come in blocks of eight from a multiple of eight on (kernels.h); an instruction set takes as many of them at once as
// its registers hold.
void linear(const Weight& w, int tile0, int tile1, int row0, int row1, const Quantized* xq, Rows x, Rows y,
            const float* bias, const Rows* residual) {
  for (int tile = tile0; tile < tile1; tile++) {
    int row = row0;
    for (; row + kRowsAtOnce <= row1; row += kRowsAtOnce)
      rows_of_tile<kRowsAtOnce>(w, tile, row, xq, x, y, bias, residual);
    if constexpr (kRowsAtOnce > 4)
      for (; row + 4 <= row1; row += 4) rows_of_tile<4>(w, tile, row, xq, x, y, bias, residual);
    for (; row + 2 <= row1; row += 2) rows_of_tile<2>(w, tile, row, xq, x, y, bias, residual);
    if (row < row1) rows_of_tile<1>(w, tile, row, xq, x, y, bias, residual);
  }
}

void rms_norm(Rows x, int heads, int width, const float* weight, float eps, Rows y, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    for (int h = 0; h < heads; h++) {
      const float* p = x.row(r) + (size_t)h * width;
      F squares = set1(0);
      int i = 0;
      for (; i + 16 <= width; i += 16) squares = fma(load(p + i), load(p + i), squares);
      if (i < width) {
        const F rest = load_part(p + i, width - i, 0);
        squares = fma(rest, rest, squares);
      }
      const F factor = set1(1.0f / std::sqrt(sum_lanes(squares) / (float)width + eps));
      each(width, p, y.row(r) + (size_t)h * width, [&](F a, int at, int n) {
        return mul(mul(a, factor), n == 16 ? load(weight + at) : load_part(weight + at, n, 0));
      });
    }
}

// cos and sin are [rows, rotary / 2]; the columns from rotary on pass through.
void rope(Rows x, int heads, int head_dim, int rotary, bool interleaved, const float* cos, const float* sin, Rows y, int row0,
          int row1) {
  const int half = rotary / 2;
  for (int r = row0; r < row1; r++)
    for (int h = 0; h < heads; h++) {
      const float *p = x.row(r) + (size_t)h * head_dim, *c = cos + (size_t)r * half, *s = sin + (size_t)r * half;
      float* out = y.row(r) + (size_t)h * head_dim;
      for (int i = 0; i < half; i++) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
        const float pa = p[a], pb = p[b];
        out[a] = pa * c[i] - pb * s[i];
        out[b] = pb * c[i] + pa * s[i];
      }
      for (int i = rotary; i < head_dim; i++) out[i] = p[i];
    }
}

// V rows are padded to whole vectors, so that reading them needs no special end.
inline int padded(int head_dim) { return (head_dim + 15) / 16 * 16; }

// The two kinds of KV memory: how 16 numbers are read and written.
struct HalfKV {
  using T = uint16_t;
  static F read(const T* p) { return load_f16(p); }
  static void write(T* p, F a) { store_f16(p, a); }
  static float choose_scale(const float*, int) { return 1.0f; }
};
struct Int8KV {
  using T = int8_t;
  static F read(const T* p) { return load_i8(p); }
  static void write(T* p, F a) { store_i8(p, round(a)); }
  static float choose_scale(const float* x, int n) {
    F top = set1(0), poison = set1(0);  // as in quantize()
    for (int i = 0; i < n; i += 16) {
      const F a = n - i < 16 ? load_part(x + i, n - i, 0) : load(x + i);
      top = max(top, abs(a));
      poison = add(poison, mul(a, set1(0)));
    }
    return max_lanes(top) / 127.0f + sum_lanes(poison);
  }
};

template <class KV>
void store_kv_as(const KVLayer& kv, Rows k, Rows v, const int64_t* slots, int row0, int row1) {
  using T = typename KV::T;
  const int D = kv.head_dim, P = padded(D), B = kv.block_size;
  for (int r = row0; r < row1; r++)
    for (int g = 0; g < kv.kv_heads; g++) {
      const size_t head = kv.place(slots[r] / B, g), offset = slots[r] % B;
      T *to_k = (T*)kv.k + head * P * B + offset, *to_v = (T*)kv.v + (head * B + offset) * P;
      const float *from_k = k.row(r) + (size_t)g * D, *from_v = v.row(r) + (size_t)g * D;
      const float scale_k = KV::choose_scale(from_k, D), scale_v = KV::choose_scale(from_v, D);
      if (kv.k_scale) {
        kv.k_scale[head * B + offset] = scale_k;
        kv.v_scale[head * B + offset] = scale_v;
      }
      const F inverse_k = set1(scale_k > kTiny ? 1.0f / scale_k : 0.0f), inverse_v = set1(scale_v > kTiny ? 1.0f / scale_v : 0.0f);
      T numbers[16];
      for (int i = 0; i < D; i += 16) {
        const int n = D - i < 16 ? D - i : 16;
        KV::write(numbers, mul(n == 16 ? load(from_k + i) : load_part(from_k + i, n, 0), inverse_k));
        for (int j = 0; j < n; j++) to_k[(size_t)(i + j) * B] = numbers[j];
        KV::write(to_v + i, mul(n == 16 ? load(from_v + i) : load_part(from_v + i, n, 0), inverse_v));
      }
    }
}

void store_kv(const KVLayer& kv, Rows k, Rows v, const int64_t* slots, int row0, int row1) {
  if (kv.k_scale)
    store_kv_as<Int8KV>(kv, k, v, slots, row0, row1);
  else
    store_kv_as<HalfKV>(kv, k, v, slots, row0, row1);
}

// Scores of R query heads with 16 positions at a time: positions lie side by side, so no sum over lanes is needed.
// `ahead` is fetched meanwhile: blocks are small and scattered, so the processor's own prefetching does not see them coming.
template <class KV, int R>
inline void scores16(const typename KV::T* k, const typename KV::T* ahead, int stride, const float* q, int D, F* out) {
  for (int r = 0; r < R; r++) out[r] = set1(0);
  for (int d = 0; d < D; d++) {
    __builtin_prefetch(ahead + (size_t)d * stride);
    const F keys = KV::read(k + (size_t)d * stride);
    for (int r = 0; r < R; r++) out[r] = fma(keys, set1(q[(size_t)r * D + d]), out[r]);
  }
}

constexpr int kAhead = 128;  // positions that memory is asked for in advance

// Columns [column, column + 16 C) of the values, weighted and summed over the positions in their order.
template <class KV, int R, int C>
inline void weigh_values(const KVLayer& kv, const float (*weights)[kAttentionSpan + 16], int g, int first, int last,
                         const int32_t* blocks, int column, float* part) {
  using T = typename KV::T;
  const int D = kv.head_dim, P = padded(D), B = kv.block_size, start = first / 16 * 16;
  F acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1(0);
  for (int p = first; p < last;) {
    const int stop = last < (p / B + 1) * B ? last : (p / B + 1) * B;  // of this block
    const int soon = p + kAhead < last ? p + kAhead : p;
    const auto at = [&](int i) {
      return (const T*)kv.v + (kv.place(blocks[i / B], g) * B + i % B) * P + column;
    };
    const T *values = at(p), *ahead = at(soon);
    for (; p < stop; p++, values += P, ahead += P)
      for (int c = 0; c < C; c++) {
        __builtin_prefetch(ahead + 16 * c);
        const F value = KV::read(values + 16 * c);
        for (int r = 0; r < R; r++) acc[r][c] = fma(value, set1(weights[r][p - start]), acc[r][c]);
      }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      const int at = column + 16 * c, left = D - at;
      float* out = part + (size_t)r * part_size(D) + 2 + at;
      if (left >= 16)
        store(out, acc[r][c]);
      else
        store_part(out, left, acc[r][c]);
    }
}

// One span of positions for R query heads that share a KV head. The maximum is the span's own; combine() rescales.
template <class KV, int R>
void attend_heads(const KVLayer& kv, const AttentionArgs& args, const float* q, int g, int first, int last,
                  const int32_t* blocks, float* part) {
  using T = typename KV::T;
  const int D = kv.head_dim, P = padded(D), B = kv.block_size;
  const int start = first / 16 * 16, count = (last + 15) / 16 * 16 - start;
  const auto head = [&](int p) { return kv.place(blocks[p / B], g); };
  float weights[R][kAttentionSpan + 16];
  F top[R];
  for (int r = 0; r < R; r++) top[r] = set1(-INFINITY);
  for (int i = 0; i < count; i += 16) {
    const int p = start + i;
    F scores[R];
    const int soon = p + kAhead < last ? p + kAhead : p;
    scores16<KV, R>((const T*)kv.k + head(p) * P * B + p % B, (const T*)kv.k + head(soon) * P * B + soon % B, B, q, D, scores);
    F scale = set1(args.scale);
    if (kv.k_scale) scale = mul(scale, load(kv.k_scale + head(p) * B + p % B));
    for (int r = 0; r < R; r++) {
      F s = mul(scores[r], scale);
      if (args.soft_cap > 0) s = mul(tanh(div(s, set1(args.soft_cap))), set1(args.soft_cap));
      store(weights[r] + i, s);
      if (p < first || p + 16 > last) {
        for (int j = 0; j < 16; j++)
          if (p + j < first || p + j >= last) weights[r][i + j] = -INFINITY;
        s = load(weights[r] + i);
      }
      top[r] = max(top[r], s);
    }
  }
  for (int r = 0; r < R; r++) {
    const float highest = max_lanes(top[r]);
    F sum = set1(0);
    for (int i = 0; i < count; i += 16) {
      store(weights[r] + i, exp(sub(load(weights[r] + i), set1(highest))));
      const int p = start + i;
      if (p < first || p + 16 > last)
        for (int j = 0; j < 16; j++)
          if (p + j < first || p + j >= last) weights[r][i + j] = 0;
      sum = add(sum, load(weights[r] + i));
    }
    part[(size_t)r * part_size(D)] = highest;
    part[(size_t)r * part_size(D) + 1] = sum_lanes(sum);
  }
  if (kv.v_scale)
    for (int p = first; p < last; p++)
      for (int r = 0; r < R; r++) weights[r][p - start] *= kv.v_scale[head(p) * B + p % B];
  int c = 0;
  for (; c + 16 * kValueVectors <= P; c += 16 * kValueVectors)
    weigh_values<KV, R, kValueVectors>(kv, weights, g, first, last, blocks, c, part);
  for (; c < P; c += 16) weigh_values<KV, R, 1>(kv, weights, g, first, last, blocks, c, part);
}

template <class KV>
void attend_as(const KVLayer& kv, const AttentionArgs& args, const float* q, int g, int first, int last,
               const int32_t* blocks, float* part) {
  const int per_group = args.heads / kv.kv_heads, D = kv.head_dim, S = part_size(D);
  q += (size_t)g * per_group * D;
  int r = 0;
  for (; r + 4 <= per_group; r += 4) attend_heads<KV, 4>(kv, args, q + r * D, g, first, last, blocks, part + r * S);
  for (; r + 3 <= per_group; r += 3) attend_heads<KV, 3>(kv, args, q + r * D, g, first, last, blocks, part + r * S);
  for (; r + 2 <= per_group; r += 2) attend_heads<KV, 2>(kv, args, q + r * D, g, first, last, blocks, part + r * S);
  for (; r < per_group; r++) attend_heads<KV, 1>(kv, args, q + r * D, g, first, last, blocks, part + r * S);
}

void attend(const KVLayer& kv, const AttentionArgs& args, const float* q, int g, int first, int last, const int32_t* blocks,
            float* part) {
  if (kv.k_scale)
    attend_as<Int8KV>(kv, args, q, g, first, last, blocks, part);
  else
    attend_as<HalfKV>(kv, args, q, g, first, last, blocks, part);
}

void combine(const float* parts, int num_parts, size_t stride, int head_dim, float* out) {
  float highest = -INFINITY, total = 0;
  for (int i = 0; i < num_parts; i++) highest = parts[i * stride] > highest ? parts[i * stride] : highest;
  for (int i = 0; i < num_parts; i++) {
    const float* part = parts + i * stride;
    const float factor = num_parts == 1 ? 1.0f : std::exp(part[0] - highest);
    total += part[1] * factor;
    each(head_dim, part + 2, out, [&](F values, int at, int n) {
      const F before = i == 0 ? set1(0) : n == 16 ? load(out + at) : load_part(out + at, n, 0);
      return fma(values, set1(factor), before);
    });
  }
  const F inverse = set1(1.0f / total);
  each(head_dim, out, out, [&](F values, int, int) { return mul(values, inverse); });
}

inline F activate(F x, Activation activation) {
  switch (activation) {
    case Activation::silu: return div(x, add(set1(1.0f), exp(sub(set1(0), x))));
    case Activation::gelu_tanh: {
      const F inner = mul(set1(0.7978845608028654f), fma(mul(mul(x, x), x), set1(0.044715f), x));
      return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
    }
    case Activation::gelu: {
      float v[16];
      store(v, x);
      for (int i = 0; i < 16; i++) v[i] = 0.5f * v[i] * (1.0f + std::erf(v[i] * 0.70710678118654752f));
      return load(v);
    }
  }
  return x;
}

void gated(Rows gate, Rows up, int width, Activation activation, Rows y, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    each(width, gate.row(r), y.row(r), [&](F a, int at, int n) {
      const F b = n == 16 ? load(up.row(r) + at) : load_part(up.row(r) + at, n, 0);
      return mul(activate(a, activation), b);
    });
}

void add_rows(Rows x, Rows y, int width, Rows out, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    each(width, x.row(r), out.row(r), [&](F a, int at, int n) {
      return add(a, n == 16 ? load(y.row(r) + at) : load_part(y.row(r) + at, n, 0));
    });
}

void scale_rows(Rows x, int width, float factor, Rows out, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    each(width, x.row(r), out.row(r), [&](F a, int, int) { return mul(a, set1(factor)); });
}

void soft_cap(Rows x, int width, float cap, Rows out, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    each(width, x.row(r), out.row(r), [&](F a, int, int) { return mul(tanh(div(a, set1(cap))), set1(cap)); });
}

void sigmoid(const float* x, int n, float* y) {
  each(n, x, y, [](F a, int, int) { return div(set1(1.0f), add(set1(1.0f), exp(sub(set1(0), a)))); });
}

void add_weighted(const float* const* parts, const float* weights, int count, int width, bool adds, float* out) {
  each(width, parts[0], out, [&](F a, int at, int n) {
    const auto load_of = [&](const float* p) { return n == 16 ? load(p + at) : load_part(p + at, n, 0); };
    F sum = adds ? fma(a, set1(weights[0]), load_of(out)) : mul(a, set1(weights[0]));
    for (int i = 1; i < count; i++) sum = fma(load_of(parts[i]), set1(weights[i]), sum);
    return sum;
  });
}

void embed(const Weight& table, const int32_t* ids, Rows y, int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const int tile = ids[r] / kTile, lane = ids[r] % kTile;
    const uint8_t* data = table.tile(tile);
    float* out = y.row(r);
    for (int k = 0; k < table.cols; k++) {
      const int g = k / kGroup, j = k % kGroup;
      switch (table.kind) {
        case WeightKind::w4: {
          const Block4& b = ((const Block4*)data)[g];
          const uint8_t byte = b.q[j % 16 / 4][4 * lane + j % 4];
          const int q = j < 16 ? byte & 15 : byte >> 4;
          out[k] = half_to_float(b.scale[lane]) * (float)q + half_to_float(b.min[lane]);
          break;
        }
        case WeightKind::w8: {
          const Block8& b = ((const Block8*)data)[g];
          out[k] = half_to_float(b.scale[lane]) * (float)b.q[j / 4][4 * lane + j % 4];
          break;
        }
        case WeightKind::f16: out[k] = half_to_float(((const uint16_t*)data)[(size_t)k * kTile + lane]); break;
        case WeightKind::bf16: out[k] = bfloat_to_float(((const uint16_t*)data)[(size_t)k * kTile + lane]); break;
        case WeightKind::f32: out[k] = ((const float*)data)[(size_t)k * kTile + lane]; break;
      }
    }
  }
}

#include "logits_impl.h"

float sum_bytes(const float* data, size_t count) {
  F sums[4] = {set1(0), set1(0), set1(0), set1(0)};
  for (size_t i = 0; i + 64 <= count; i += 64)
    for (int j = 0; j < 4; j++) sums[j] = add(sums[j], load(data + i + 16 * j));
  return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

float int8_burst(int steps) {
  int8_t weights[64] = {}, x[16] = {1, 2, 3, 4};
  const typename Dot8::W w = Dot8::unpack(weights);
  typename Dot8::A sums[4] = {Dot8::zero(0), Dot8::zero(1), Dot8::zero(2), Dot8::zero(3)};
  for (int i = 0; i < steps; i++)
    for (int j = 0; j < 4; j++) sums[j] = Dot8::step(sums[j], w, x + 4 * (i % 4));
  return sum_lanes(add(add(to_float(Dot8::finish(sums[0])), to_float(Dot8::finish(sums[1]))),
                       add(to_float(Dot8::finish(sums[2])), to_float(Dot8::finish(sums[3])))));
}

constexpr Kernels make_table(const char* name) {
  return {name,     quantize,   linear,     rms_norm, rope,       store_kv, attend,    combine,    gated,
          add_rows, scale_rows, soft_cap,   sigmoid,  add_weighted, peak,   lane_peaks, weigh,    find_from, sum_bytes,
          int8_burst, embed};
}

}  // namespace HR_ISA
