// Attention of a program: spans of positions that are attended each on its own, and joined in their order.
#include <algorithm>

#include "program.h"

namespace hr {

void Program::attention(View q, View k, View v, int layer, AttentionArgs args, View out) {
  push({[=](const Inputs& in, int, int, int begin, int end) {
          kernels().store_kv(kv_[layer], rows(k), rows(v), in.kv_slots, begin, end);
        },
        {}});
  const Attention it{q, out, layer, spans_kind(args.window), args, q.width / args.heads};
  const int part = part_size(it.head_dim);
  floats_per_span_ = std::max(floats_per_span_, (size_t)args.heads * part);

  Command attend;
  attend.is_row_work = false;
  attend.shares_per_thread = 16;  // units differ in length, so shares are small
  attend.num_units = [=](const Inputs& in, int) {
    return (attends_by_row_ ? in.num_tokens : (int)spans_[it.kind].spans.size()) * kv_[layer].kv_heads;
  };
  attend.work = [=](const Inputs& in, int rank, int, int begin, int end) {
    const int kv_heads = kv_[layer].kv_heads;
    for (int unit = begin; unit < end; unit++)
      if (attends_by_row_)
        attend_row(in, it, unit / kv_heads, unit % kv_heads, parts_.data() + rank * floats_per_rank_);
      else
        attend_span(in, it, spans_[it.kind].spans[unit / kv_heads], unit % kv_heads,
                    parts_.data() + (size_t)unit * (args.heads / kv_heads) * part);
  };
  push(std::move(attend));
  push({[=](const Inputs&, int, int, int begin, int end) {
          const auto& starts = spans_[it.kind].starts;
          const size_t stride = (size_t)args.heads * part;
          for (int r = begin; r < end && !attends_by_row_; r++)
            for (int h = 0; h < args.heads; h++)
              kernels().combine(parts_.data() + starts[r] * stride + (size_t)h * part, starts[r + 1] - starts[r], stride,
                                it.head_dim, rows(out).row(r) + (size_t)h * it.head_dim);
        },
        {}});
}

void Program::attend_span(const Inputs& in, const Attention& it, const Span& span, int g, float* part) {
  const int32_t* blocks = in.block_tables + (size_t)sequence_of_[span.row] * in.table_width;
  kernels().attend(kv_[it.layer], it.args, rows(it.q).row(span.row), g, span.first, span.last, blocks, part);
}

// All spans of one row and KV head, joined at once.
void Program::attend_row(const Inputs& in, const Attention& it, int row, int g, float* parts) {
  const Spans& kind = spans_[it.kind];
  const int first = kind.starts[row], count = kind.starts[row + 1] - first;
  const int heads = it.args.heads / kv_[it.layer].kv_heads, part = part_size(it.head_dim);
  const size_t stride = (size_t)heads * part;
  for (int i = 0; i < count; i++) attend_span(in, it, kind.spans[first + i], g, parts + i * stride);
  float* out = rows(it.out).row(row) + (size_t)g * heads * it.head_dim;
  for (int h = 0; h < heads; h++)
    kernels().combine(parts + (size_t)h * part, count, stride, it.head_dim, out + (size_t)h * it.head_dim);
}

size_t Program::spans_kind(int window) {
  size_t kind = 0;
  while (kind < spans_.size() && spans_[kind].window != window) kind++;
  if (kind == spans_.size()) spans_.push_back({window, {}, {}});
  return kind;
}

// Every row's spans, and room for their parts. Where all of them together would take too much, the spans of a row are
// attended and joined by one thread. The bits are the same.
void Program::prepare_attention(const Inputs& in) {
  sequence_of_.resize(in.num_tokens);
  for (int s = 0; s < in.num_sequences; s++)
    for (int t = in.query_starts[s]; t < in.query_starts[s + 1]; t++) sequence_of_[t] = s;
  size_t most_spans = 0, most_of_row = 0;
  for (auto& kind : spans_) {
    kind.spans.clear();
    kind.starts.assign(1, 0);
    for (int t = 0; t < in.num_tokens; t++) {
      const int context = in.positions[t] + 1;
      int first = kind.window && context > kind.window ? context - kind.window : 0;
      while (first < context) {
        const int last = std::min(context, (first / kAttentionSpan + 1) * kAttentionSpan);
        kind.spans.push_back({t, first, last});
        first = last;
      }
      most_of_row = std::max(most_of_row, kind.spans.size() - kind.starts.back());
      kind.starts.push_back((int32_t)kind.spans.size());
    }
    most_spans = std::max(most_spans, kind.spans.size());
  }
  attends_by_row_ = most_spans * floats_per_span_ * sizeof(float) > kMostPartBytes;
  floats_per_rank_ = most_of_row * floats_per_span_;
  const size_t need = attends_by_row_ ? floats_per_rank_ * pool_.size() : most_spans * floats_per_span_;
  if (parts_.size() < need) parts_.resize(need);
}

}  // namespace hr
