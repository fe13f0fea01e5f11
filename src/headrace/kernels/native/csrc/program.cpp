#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace hr {

int Program::add_buffer(int width, int rows_per_token, int extra_rows) {
  buffers_.push_back({width, rows_per_token, extra_rows, behind_logit_rows_, false, {}, nullptr});
  return (int)buffers_.size() - 1;
}

int Program::add_shared_buffer(int width, int rows_per_token, int extra_rows) {
  const int index = add_buffer(width, rows_per_token, extra_rows);
  buffers_[index].is_shared = group_ != nullptr;
  return index;
}

void Program::barrier() {
  if (!group_) return;
  Command command;
  command.is_row_work = false;
  command.num_units = [](const Inputs&, int) { return 1; };
  command.work = [this](const Inputs&, int, int, int, int) { group_->barrier(); };
  push(std::move(command));
}

int Program::add_quantized(int cols) {
  quantized_.push_back({(cols + kGroup - 1) / kGroup, behind_logit_rows_, {}});
  return (int)quantized_.size() - 1;
}

Quantized Program::quantized(int index) {
  auto& b = quantized_[index];
  return {b.memory.data(), b.groups};
}

int Program::add_rope_table(std::vector<float> inv_freq, float attention_scale) {
  rope_tables_.push_back({std::move(inv_freq), attention_scale, {}, {}});
  return (int)rope_tables_.size() - 1;
}

// Commands that work row by row, one after the other, become one: whoever takes a row does all of them, so that the row stays
// in that core's cache and nobody waits in between.
void Program::push(Command command) {
  command.wants_logit_rows = behind_logit_rows_;
  if (command.is_row_work) {
    command.num_units = [](const Inputs&, int rows) { return rows; };
    if (!commands_.empty()) {
      Command& last = commands_.back();
      if (last.is_row_work && last.wants_logit_rows == command.wants_logit_rows) {
        last.work = [first = std::move(last.work), second = std::move(command.work)](const Inputs& in, int rank, int rows,
                                                                                     int begin, int end) {
          for (int r = begin; r < end; r++) {
            first(in, rank, rows, r, r + 1);
            second(in, rank, rows, r, r + 1);
          }
        };
        return;
      }
    }
  }
  commands_.push_back(std::move(command));
  slots_.emplace_back();
}

void Program::embed(const Weight* table, int first, View out) {
  push({[=](const Inputs& in, int, int, int begin, int end) {
          for (int r = begin; r < end; r++) {
            const int32_t row = in.token_ids[r] - first;
            if (row >= 0 && row < table->rows) kernels().embed(*table, &row, {rows(out).row(r), 0}, 0, 1);
          }
        },
        {}});
}

void Program::scale(View x, float factor, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) { kernels().scale(rows(x), x.width, factor, rows(out), begin, end); }, {}});
}

void Program::add(View x, View y, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) { kernels().add(rows(x), rows(y), x.width, rows(out), begin, end); }, {}});
}

void Program::rms_norm(View x, int heads, const float* weight, float eps, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) {
          kernels().rms_norm(rows(x), heads, x.width / heads, weight, eps, rows(out), begin, end);
        },
        {}});
}

void Program::quantize(View x, int index) {
  push({[=](const Inputs&, int, int, int begin, int end) { kernels().quantize(rows(x), x.width, quantized(index), begin, end); }, {}});
}

// A unit is one tile for one chunk of rows: weights are read once per chunk, and a chunk's inputs stay in the cache.
void Program::linear(View x, int index, std::vector<Segment> segments, View residual, View out) {
  int tiles = 0;
  for (auto& s : segments) tiles += s.weight->tiles;
  Command command;
  command.is_row_work = false;
  command.shares_per_thread = 8;
  command.num_units = [tiles](const Inputs&, int rows) { return tiles * ((rows + kRowChunk - 1) / kRowChunk); };
  command.work = [=](const Inputs&, int, int num_rows, int begin, int end) {
    const Quantized q = index >= 0 ? quantized(index) : Quantized{};
    while (begin < end) {
      const int chunk = begin / tiles, row0 = chunk * kRowChunk, row1 = std::min(num_rows, row0 + kRowChunk);
      const int tile = begin % tiles, stop = std::min(end - chunk * tiles, tiles);
      begin += stop - tile;
      const Rows r = residual.buffer >= 0 ? rows(residual) : Rows{};
      stacked_linear(kernels(), segments, tile, stop, row0, row1, index >= 0 ? &q : nullptr, rows(x), rows(out),
                     residual.buffer >= 0 ? &r : nullptr);
    }
  };
  push(std::move(command));
}

void Program::rope(View x, int heads, int table, int rotary, bool interleaved, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) {
          const RopeTable& t = rope_tables_[table];
          kernels().rope(rows(x), heads, x.width / heads, rotary, interleaved, t.cos.data(), t.sin.data(), rows(out), begin, end);
        },
        {}});
}

void Program::gated(View gate, View up, Activation activation, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) {
          kernels().gated(rows(gate), rows(up), gate.width, activation, rows(out), begin, end);
        },
        {}});
}

// Costs nothing in a step where no row is asked for.
void Program::hidden(View x, const float* weight, float eps) {
  Command command;
  command.is_row_work = false;
  command.num_units = [](const Inputs& in, int) { return in.num_hidden; };
  command.work = [=](const Inputs& in, int, int, int begin, int end) {
    for (int r = begin; r < end; r++)
      kernels().rms_norm({rows(x).row(in.hidden_rows[r]), 0}, 1, x.width, weight, eps,
                         {outputs_.hidden + (size_t)r * x.width, 0}, 0, 1);
  };
  push(std::move(command));
  hidden_width_ = x.width;
}

int Program::logit_rows(View x) {
  behind_logit_rows_ = true;
  const int buffer = add_buffer(x.width);
  const View out{buffer, 0, x.width};
  push({[=](const Inputs& in, int, int, int begin, int end) {
          for (int r = begin; r < end; r++)
            std::memcpy(rows(out).row(r), rows(x).row(in.logit_rows[r]), sizeof(float) * x.width);
        },
        {}});
  return buffer;
}

void Program::soft_cap(View x, float cap, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) { kernels().soft_cap(rows(x), x.width, cap, rows(out), begin, end); }, {}});
}

// Grows the buffers to this step's rows, and computes what depends on positions alone.
void Program::prepare(const Inputs& in) {
  size_t shared = 0;  // floats of the heap; every rank comes to the same places
  for (size_t i = 0; i < buffers_.size(); i++) {
    Buffer& b = buffers_[i];
    const size_t tokens = b.behind_logit_rows ? in.num_logits : in.num_tokens;
    const size_t need = (tokens * b.rows_per_token + b.extra_rows) * b.width;
    if ((int)i == output_) {
      b.data = outputs_.logits;
    } else if (b.is_shared) {
      b.data = (float*)group_->heap() + shared;
      shared += (need + 15) / 16 * 16;
      if (shared * sizeof(float) > Group::kHeap) throw std::bad_alloc();
    } else {
      if (b.memory.size() < need) b.memory.assign(need, 0.0f);
      b.data = b.memory.data();
    }
  }
  for (auto& b : quantized_) {
    const int rows = b.behind_logit_rows ? in.num_logits : in.num_tokens;
    const size_t need = (size_t)((rows + kRowBlock - 1) / kRowBlock) * b.groups;
    if (b.memory.size() < need) b.memory.assign(need, {});
  }
  prepare_attention(in);
  pairs_.prepare(std::max(in.num_tokens, in.num_logits), num_ranks());
  if (peaks_.size() < (size_t)in.num_logits * peaks_per_row_) peaks_.resize((size_t)in.num_logits * peaks_per_row_);
  for (auto& table : rope_tables_) {
    const size_t half = table.inv_freq.size();
    table.cos.resize(in.num_tokens * half);
    table.sin.resize(in.num_tokens * half);
    for (int t = 0; t < in.num_tokens; t++)
      for (size_t i = 0; i < half; i++) {
        const float angle = (float)in.positions[t] * table.inv_freq[i];
        table.cos[t * half + i] = std::cos(angle) * table.attention_scale;
        table.sin[t * half + i] = std::sin(angle) * table.attention_scale;
      }
  }
}

void Program::open(uint32_t generation) {
  for (size_t i = 0; i < commands_.size(); i++) {
    const Command& command = commands_[i];
    const int units = command.num_units(*inputs_, command.wants_logit_rows ? inputs_->num_logits : inputs_->num_tokens);
    slots_[i].open(generation, units, std::max(1, units / (pool_.size() * command.shares_per_thread)));
  }
}

void Program::help(int rank, uint32_t generation) {
  for (size_t i = 0; i < commands_.size(); i++) {
    const Command& command = commands_[i];
    const bool is_current = slots_[i].help(generation, [&](int begin, int end) {
      command.work(*inputs_, rank, command.wants_logit_rows ? inputs_->num_logits : inputs_->num_tokens, begin, end);
    });
    if (!is_current) return;
  }
}

void Program::run(const Inputs& in, const Outputs& outputs) {
  inputs_ = &in;
  outputs_ = outputs;
  prepare(in);
  pool_.run(*this);
  if (group_ && group_->has_failed()) throw std::runtime_error("another rank of this model has failed");
}

}  // namespace hr
