// The end of a program: logits, and of each row the first largest and whether it is finite.
#include <algorithm>
#include <cmath>

#include "program.h"

namespace hr {
namespace {

constexpr int kPieceTiles = 8;  // whose largest output is noted at once
constexpr int kPiece = kPieceTiles * kTile;

int num_pieces(int width) { return (width + kPiece - 1) / kPiece; }

// The piece with the largest peak, the first of them; a peak is NaN where its piece is not finite.
int highest_piece(const float* peaks, int count, bool* is_finite) {
  int highest = 0;
  *is_finite = true;
  for (int i = 0; i < count; i++) {
    *is_finite &= !std::isnan(peaks[i]);
    if (peaks[i] > peaks[highest]) highest = i;
  }
  return highest;
}

}  // namespace

// A unit is a piece of the outputs for one chunk of rows, whose peaks are taken while they are in the core's cache.
void Program::head(View x, int index, Segment weight, View out) {
  const int pieces = num_pieces(weight.weight->rows);
  Command command;
  command.is_row_work = false;
  command.shares_per_thread = 8;
  command.num_units = [pieces](const Inputs&, int rows) { return pieces * ((rows + kRowChunk - 1) / kRowChunk); };
  command.work = [=](const Inputs&, int, int num_rows, int begin, int end) {
    const Quantized q = index >= 0 ? quantized(index) : Quantized{};
    for (int unit = begin; unit < end; unit++) {
      const int piece = unit % pieces, row0 = unit / pieces * kRowChunk, row1 = std::min(num_rows, row0 + kRowChunk);
      const int first = piece * kPiece, count = std::min(kPiece, weight.weight->rows - first);
      const int tile = piece * kPieceTiles, tiles = (count + kTile - 1) / kTile;
      kernels().linear(*weight.weight, tile, tile + tiles, row0, row1, index >= 0 ? &q : nullptr, rows(x), rows(out),
                       weight.bias, nullptr);
      for (int r = row0; r < row1; r++)
        peaks_[(size_t)r * pieces + piece] = kernels().peak(rows(out).row(r) + first, count);
    }
  };
  push(std::move(command));
  has_peaks_ = true;
}

void Program::output(View x) {
  output_ = x.buffer;
  const int pieces = peaks_per_row_ = num_pieces(x.width);
  push({[=, has_peaks = has_peaks_](const Inputs&, int, int, int begin, int end) {
          for (int r = begin; r < end; r++) {
            const float* row = rows(x).row(r);
            float* peaks = peaks_.data() + (size_t)r * pieces;
            for (int i = 0; i < pieces && !has_peaks; i++)
              peaks[i] = kernels().peak(row + i * kPiece, std::min(kPiece, x.width - i * kPiece));
            const int piece = highest_piece(peaks, pieces, outputs_.is_finite + r);
            const int last = std::min(x.width, (piece + 1) * kPiece) - 1;
            int at = piece * kPiece;
            while (at < last && row[at] != peaks[piece]) at++;
            outputs_.best[r] = at;
          }
        },
        {}});
}

}  // namespace hr
