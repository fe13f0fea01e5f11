// The kernels of one instruction set, as a table of functions over plain memory. Each does a range of independent units of
// work; who calls them, and in how many threads, is the program's business (program.h). Each sum has one order that depends
// on nothing but the unit itself, which is why a row's bits do not depend on the rows beside it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "memory.h"

namespace hr {

constexpr int kTile = 16;   // outputs per tile of a packed weight
constexpr int kGroup = 32;  // k per scale

enum class WeightKind { w4, w8, f16, bf16, f32 };

// W4 tile and group: 4 lines of 64 bytes (16 outputs x 4 k; low nibbles are k 0-15, high ones k 16-31), scales, minimums.
struct Block4 {
  uint8_t q[4][64];
  uint16_t scale[kTile], min[kTile];  // fp16: weight = scale * q + min
};
// W8: 8 lines of 64 bytes (16 outputs x 4 k).
struct Block8 {
  int8_t q[8][64];
  uint16_t scale[kTile];  // fp16: weight = scale * q
};

// A matrix [rows, cols] packed in tiles of 16 rows; rows and cols are padded with zeros.
struct Weight {
  WeightKind kind;
  int rows, cols;
  int tiles, groups;  // ceil(rows / 16), ceil(cols / 32)
  size_t tile_bytes;  // of one tile, all groups
  std::shared_ptr<Memory> memory;  // holds the data, perhaps beside that of other weights
  uint8_t* data;
  uint8_t* tile(int t) const { return data + (size_t)t * tile_bytes; }
};

constexpr int kRowBlock = 8;  // rows that are quantised side by side

// One group of up to eight rows, in 8 bits. Side by side, so that a kernel finds all it needs of its rows at fixed places.
//
// Few channels of a language model are much larger than the others (LLM.int8, arXiv 2208.07339), and the scale of a group
// that holds one would leave nothing of its neighbours. So a number more than kOutlier times as large as the others of its
// group is kept as a float, and its q is 0. docs/log.md has what this is worth.
struct QuantizedGroup {
  int8_t q[kRowBlock][kGroup];
  float scale[kRowBlock];       // of q
  float outlier[kRowBlock];     // 0 where there is none
  float sum[kRowBlock];         // of all numbers, as quantised: what a weight's minimum is multiplied with
  int32_t sum_q[kRowBlock];     // of q
  // Where the weights of the outlier lie in a block: the line of 64 bytes, and the bits to shift each 32-bit lane by
  // (right with 4-bit weights, left with 8-bit ones).
  int32_t line4[kRowBlock], shift4[kRowBlock];
  int32_t line8[kRowBlock], shift8[kRowBlock];
  bool has_outlier[kRowBlock];
};

struct Quantized {
  QuantizedGroup* groups;  // [ceil(rows / 8), num_groups]
  int num_groups;
  QuantizedGroup* at(int row) const { return groups + (size_t)(row / kRowBlock) * num_groups; }
};

struct Rows {  // a view of some columns of a buffer
  float* data;
  int stride;  // floats from row to row
  float* row(int r) const { return data + (size_t)r * stride; }
};

// One layer's paged KV. Blocks come in extents of 64: an extent holds them for all layers, so that memory is touched in proportion
// to the blocks in use and huge pages suit it; inside, each layer and head has its 64 blocks in a row, [layers, K or V,
// kv_heads, 64, ...], so that they are read as one stream. A block of K has its positions contiguous, [padded head_dim,
// block_size], so that scores of 16 positions are computed side by side; one of V is [block_size, padded head_dim]. As int8
// each position and head has a scale for K and one for V, [..., block_size], in a memory of the same order.
constexpr int kExtent = 64;

struct KVLayer {
  void *k, *v;               // fp16, or int8 where there are scales; of this layer in the first extent
  float *k_scale, *v_scale;  // nullptr with fp16
  int kv_heads, head_dim, block_size;
  size_t extent_stride;  // from one extent to the next, in blocks of one head
  size_t place(int64_t block, int g) const {  // of a block of one head, in such blocks
    return (size_t)(block / kExtent) * extent_stride + (size_t)g * kExtent + block % kExtent;
  }
};

struct AttentionArgs {
  int heads;
  float scale, soft_cap;  // soft_cap 0: none
  int window;             // 0: none
};

constexpr int kInt8OpsPerStep = 4 * 64 * 2;

constexpr int kAttentionSpan = 256;  // positions per unit of attention; fixed, so that sums never depend on the batch

// Floats of one query head's part: maximum, sum, then values.
inline int part_size(int head_dim) { return 2 + head_dim; }

constexpr int kMostParts = 16;

enum class Activation { silu, gelu, gelu_tanh };

// Probability of a logit over that of the highest one, e^((logit - highest) / temperature); 0 where that is below min_p.
struct Weighing {
  float highest, temperature, min_p;
};

struct Kernels {
  const char* name;
  void (*quantize)(Rows x, int cols, const Quantized& out, int row0, int row1);
  // y[rows, w.rows] = x times w transposed, for tiles [tile0, tile1) and rows [row0, row1); then + bias, then + residual
  void (*linear)(const Weight& w, int tile0, int tile1, int row0, int row1, const Quantized* xq, Rows x, Rows y,
                 const float* bias, const Rows* residual);
  void (*rms_norm)(Rows x, int heads, int width, const float* weight, float eps, Rows y, int row0, int row1);
  void (*rope)(Rows x, int heads, int head_dim, int rotary, bool interleaved, const float* cos, const float* sin, Rows y,
               int row0, int row1);
  void (*store_kv)(const KVLayer& kv, Rows k, Rows v, const int64_t* slots, int row0, int row1);
  // One unit: positions [first, last) for one row and KV head g, with all its query heads. Writes to `part` what
  // combine() needs: per query head its maximum, its sum of exponentials and its weighted values. `first` is a multiple of
  // kAttentionSpan or the start of a window.
  void (*attend)(const KVLayer& kv, const AttentionArgs& args, const float* q, int g, int first, int last,
                 const int32_t* blocks, float* part);
  // Joins the spans of one row and query head in their order: parts lie `stride` floats apart.
  void (*combine)(const float* parts, int num_parts, size_t stride, int head_dim, float* out);
  void (*gated)(Rows gate, Rows up, int width, Activation activation, Rows y, int row0, int row1);
  void (*add)(Rows x, Rows y, int width, Rows out, int row0, int row1);
  void (*scale)(Rows x, int width, float factor, Rows out, int row0, int row1);
  void (*soft_cap)(Rows x, int width, float cap, Rows out, int row0, int row1);
  void (*sigmoid)(const float* x, int n, float* y);
  // out = parts[0] * weights[0] + parts[1] * weights[1] + ... in this order, for at most kMostParts; on top of out if `adds`.
  void (*add_weighted)(const float* const* parts, const float* weights, int count, int width, bool adds, float* out);
  // The largest of n numbers, or NaN if not all are finite.
  float (*peak)(const float* x, int n);
  // The largest of the numbers at i, i + 16, i + 32, ..., for each i below 16. None may be NaN.
  void (*lane_peaks)(const float* x, int n, float* peaks);
  // What each of n logits weighs; returns the sum. None may be NaN or above the highest.
  float (*weigh)(const float* x, int n, const Weighing& by, float* weights);
  // Indices of the numbers that are at least `bound`, in order; returns how many.
  int (*find_from)(const float* x, int n, float bound, int32_t* found);
  float (*sum_bytes)(const float* data, size_t count);  // reads it all: for measuring memory
  float (*int8_burst)(int steps);                        // kInt8OpsPerStep operations a step, out of registers
  void (*embed)(const Weight& table, const int32_t* ids, Rows y, int row0, int row1);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();     // nullptr when it was not compiled in
const Kernels* avx512_kernels();   // with VNNI
const Kernels* best_kernels();     // by what the processor has, or what was forced
bool force_kernels(const std::string& name);

}  // namespace hr
