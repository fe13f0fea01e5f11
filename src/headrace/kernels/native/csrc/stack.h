// A weight made of parts that are stacked along their outputs, each packed on its own, so that their kinds may differ.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace hr {

constexpr int kRowChunk = 16;  // rows for which a tile of weights is read once

struct Segment {  // one part of a stacked weight and where its outputs go
  const Weight* weight;
  int offset;
  const float* bias;
};

// Tiles [tile, stop), counted through all parts, for rows [row0, row1). See Kernels::linear.
inline void stacked_linear(const Kernels& kernels, const std::vector<Segment>& segments, int tile, int stop, int row0, int row1,
                           const Quantized* xq, Rows x, Rows y, const Rows* residual) {
  int first = 0;  // of the segment, in tiles
  for (const Segment& s : segments) {
    const int n = s.weight->tiles, from = std::max(tile - first, 0), to = std::min(stop - first, n);
    if (from < to) {
      const Rows r = residual ? Rows{residual->data + s.offset, residual->stride} : Rows{};
      kernels.linear(*s.weight, from, to, row0, row1, xq, x, {y.data + s.offset, y.stride}, s.bias, residual ? &r : nullptr);
    }
    first += n;
  }
}

}  // namespace hr
