#include "pack.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace hr {
namespace {

Weight shape_of(WeightKind kind, int rows, int cols) {
  Weight w;
  w.kind = kind;
  w.rows = rows;
  w.cols = cols;
  w.tiles = (rows + kTile - 1) / kTile;
  w.groups = (cols + kGroup - 1) / kGroup;
  switch (kind) {
    case WeightKind::w4: w.tile_bytes = sizeof(Block4) * w.groups; break;
    case WeightKind::w8: w.tile_bytes = sizeof(Block8) * w.groups; break;
    case WeightKind::f16:
    case WeightKind::bf16: w.tile_bytes = 2u * kTile * cols; break;
    case WeightKind::f32: w.tile_bytes = 4u * kTile * cols; break;
  }
  return w;
}

Weight allocate(Arena& arena, WeightKind kind, int rows, int cols) {
  Weight w = shape_of(kind, rows, cols);
  w.memory = arena.take((size_t)w.tiles * w.tile_bytes, &w.data);
  return w;
}

struct Values4 {  // one group of one row
  uint8_t q[kGroup];
  uint16_t scale, min;
};

template <class Read>
Weight fill4(Arena& arena, int rows, int cols, Read read) {
  Weight w = allocate(arena, WeightKind::w4, rows, cols);
  for (int r = 0; r < rows; r++) {
    auto* tile = (Block4*)w.tile(r / kTile);
    const int lane = r % kTile;
    for (int g = 0; g < w.groups; g++) {
      const Values4 v = read(r, g);
      for (int j = 0; j < 16; j++) tile[g].q[j / 4][4 * lane + j % 4] = (uint8_t)(v.q[j] | v.q[j + 16] << 4);
      tile[g].scale[lane] = v.scale;
      tile[g].min[lane] = v.min;
    }
  }
  return w;
}

template <class Read>
Weight fill8(Arena& arena, int rows, int cols, Read read) {  // read(row, group, int8 out[32]) returns the scale as fp16
  Weight w = allocate(arena, WeightKind::w8, rows, cols);
  int8_t q[kGroup];
  for (int r = 0; r < rows; r++) {
    auto* tile = (Block8*)w.tile(r / kTile);
    const int lane = r % kTile;
    for (int g = 0; g < w.groups; g++) {
      tile[g].scale[lane] = read(r, g, q);
      for (int j = 0; j < kGroup; j++) tile[g].q[j / 4][4 * lane + j % 4] = q[j];
    }
  }
  return w;
}

template <class T>  // the bytes come from a file and need not be aligned
Weight fill_plain(Arena& arena, const void* values, int rows, int cols, WeightKind kind) {
  Weight w = allocate(arena, kind, rows, cols);
  for (int r = 0; r < rows; r++) {
    T* tile = (T*)w.tile(r / kTile);
    for (int k = 0; k < cols; k++)
      std::memcpy(tile + (size_t)k * kTile + r % kTile, (const uint8_t*)values + ((size_t)r * cols + k) * sizeof(T), sizeof(T));
  }
  return w;
}

uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

void nibbles(const uint8_t* p, uint8_t* q) {
  for (int j = 0; j < 16; j++) {
    q[j] = p[j] & 15;
    q[j + 16] = p[j] >> 4;
  }
}

// The part of row r that group g covers, padded with zeros.
void take_group(const float* values, int cols, int r, int g, float* out) {
  for (int j = 0; j < kGroup; j++) {
    const int k = g * kGroup + j;
    out[j] = k < cols ? values[(size_t)r * cols + k] : 0.0f;
  }
}

// Zero, or NaN where a number is not finite: such a weight must show in the results.
float poison(const float* x) {
  float sum = 0;
  for (int j = 0; j < kGroup; j++) sum += x[j] * 0.0f;
  return sum;
}

}  // namespace

Weight pack_q4_0(Arena& arena, const uint8_t* blocks, int rows, int cols) {
  return fill4(arena, rows, cols, [=](int r, int g) {
    const uint8_t* b = blocks + ((size_t)r * (cols / kGroup) + g) * 18;
    Values4 v;
    nibbles(b + 2, v.q);
    v.scale = read16(b);
    v.min = float_to_half(-8.0f * half_to_float(v.scale));
    return v;
  });
}

Weight pack_q4_1(Arena& arena, const uint8_t* blocks, int rows, int cols) {
  return fill4(arena, rows, cols, [=](int r, int g) {
    const uint8_t* b = blocks + ((size_t)r * (cols / kGroup) + g) * 20;
    Values4 v;
    nibbles(b + 4, v.q);
    v.scale = read16(b);
    v.min = read16(b + 2);
    return v;
  });
}

// Super-blocks of 256: fp16 d and dmin, 6-bit scales and minimums of 8 groups in 12 bytes, then nibbles, 64 weights per
// 32 bytes (llama.cpp's block_q4_K).
Weight pack_q4_k(Arena& arena, const uint8_t* blocks, int rows, int cols) {
  return fill4(arena, rows, cols, [=](int r, int g) {
    const uint8_t* b = blocks + ((size_t)r * (cols / 256) + g / 8) * 144;
    const uint8_t* packed = b + 4;
    const int j = g % 8;
    int scale, minimum;
    if (j < 4) {
      scale = packed[j] & 63;
      minimum = packed[j + 4] & 63;
    } else {
      scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
      minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
    const uint8_t* qs = b + 16 + j / 2 * 32;
    Values4 v;
    for (int i = 0; i < kGroup; i++) v.q[i] = j % 2 ? qs[i] >> 4 : qs[i] & 15;
    v.scale = float_to_half(half_to_float(read16(b)) * (float)scale);
    v.min = float_to_half(-half_to_float(read16(b + 2)) * (float)minimum);
    return v;
  });
}

Weight pack_q8_0(Arena& arena, const uint8_t* blocks, int rows, int cols) {
  return fill8(arena, rows, cols, [=](int r, int g, int8_t* q) {
    const uint8_t* b = blocks + ((size_t)r * (cols / kGroup) + g) * 34;
    std::memcpy(q, b + 2, kGroup);
    // -128 would overflow the signed product of the AVX2 kernel; encoders never write it, a hostile file may
    for (int j = 0; j < kGroup; j++)
      if (q[j] == -128) q[j] = -127;
    return read16(b);
  });
}

Weight pack_w8(Arena& arena, const float* values, int rows, int cols) {
  return fill8(arena, rows, cols, [=](int r, int g, int8_t* q) {
    float x[kGroup], top = 0;
    take_group(values, cols, r, g, x);
    for (float a : x) top = std::fmax(top, std::fabs(a));
    const uint16_t scale = float_to_half(top / 127.0f + poison(x));
    const float d = half_to_float(scale), inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int j = 0; j < kGroup; j++) q[j] = (int8_t)std::fmin(127.0f, std::fmax(-127.0f, std::nearbyintf(x[j] * inverse)));
    return scale;
  });
}

Weight pack_w4(Arena& arena, const float* values, int rows, int cols) {
  return fill4(arena, rows, cols, [=](int r, int g) {
    float x[kGroup];
    take_group(values, cols, r, g, x);
    float low = x[0], high = x[0];
    for (float a : x) {
      low = std::fmin(low, a);
      high = std::fmax(high, a);
    }
    Values4 v;
    v.scale = float_to_half((high - low) / 15.0f + poison(x));
    v.min = float_to_half(low);
    const float d = half_to_float(v.scale), m = half_to_float(v.min), inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int j = 0; j < kGroup; j++) v.q[j] = (uint8_t)std::fmin(15.0f, std::fmax(0.0f, std::nearbyintf((x[j] - m) * inverse)));
    return v;
  });
}

Weight pack_f32(Arena& arena, const float* values, int rows, int cols) { return fill_plain<float>(arena, values, rows, cols, WeightKind::f32); }

Weight pack_half(Arena& arena, const uint8_t* values, int rows, int cols, WeightKind kind) {
  return fill_plain<uint16_t>(arena, values, rows, cols, kind);
}

const char* kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::w4: return "w4";
    case WeightKind::w8: return "w8";
    case WeightKind::f16: return "f16";
    case WeightKind::bf16: return "bf16";
    case WeightKind::f32: return "f32";
  }
  return "";
}

Weight blank(WeightKind kind, int rows, int cols) {
  constexpr size_t kHugePage = 2u << 20;
  Weight w = shape_of(kind, rows, cols);
  const size_t bytes = (size_t)w.tiles * w.tile_bytes;
  w.memory = std::make_shared<Memory>(bytes, bytes >= kHugePage);
  w.data = w.memory->data();
  return w;
}

}  // namespace hr
