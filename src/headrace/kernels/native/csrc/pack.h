// Repacks checkpoint weights into tiles (kernels.h): GGUF blocks as they are, floats by rounding to 8 or 4 bits.
#pragma once
#include "kernels.h"

namespace hr {

Weight pack_q4_0(Arena& arena, const uint8_t* blocks, int rows, int cols);
Weight pack_q4_1(Arena& arena, const uint8_t* blocks, int rows, int cols);
Weight pack_q4_k(Arena& arena, const uint8_t* blocks, int rows, int cols);
Weight pack_q8_0(Arena& arena, const uint8_t* blocks, int rows, int cols);
Weight pack_w8(Arena& arena, const float* values, int rows, int cols);  // symmetric per group of 32
Weight pack_w4(Arena& arena, const float* values, int rows, int cols);  // with a minimum per group of 32
Weight pack_f32(Arena& arena, const float* values, int rows, int cols);
Weight pack_half(Arena& arena, const uint8_t* values, int rows, int cols, WeightKind kind);  // f16 or bf16, bits as they are

// Zeros in memory of its own, which goes when this weight does: for one that is copied in and may be replaced alone.
Weight blank(WeightKind kind, int rows, int cols);
const char* kind_name(WeightKind kind);

}  // namespace hr
