#include "experts.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "program.h"

namespace hr {
namespace {

int groups_of(int cols) { return (cols + kGroup - 1) / kGroup; }

template <class T>
void grow(std::vector<T>& memory, size_t need) {
  if (memory.size() < need) memory.assign(need, T{});
}

void raise(ExpertWeights::Stack& most, const ExpertWeights::Stack& stack) {
  most.tiles = std::max(most.tiles, stack.tiles);
  most.rows = std::max(most.rows, stack.rows);
  most.cols = std::max(most.cols, stack.cols);
  most.has_quantized |= stack.has_quantized;
  most.has_floats |= stack.has_floats;
}

}  // namespace

void ExpertWeights::Stack::push(const Weight* weight) {
  if (!segments.empty() && weight->cols != cols) throw std::invalid_argument("an expert's parts have different widths");
  const bool is_quantized = weight->kind == WeightKind::w4 || weight->kind == WeightKind::w8;
  segments.push_back({weight, rows, nullptr});
  tiles += weight->tiles;
  rows += weight->rows;
  cols = weight->cols;
  has_quantized |= is_quantized;
  has_floats |= !is_quantized;
}

void ExpertTable::place(const std::vector<int32_t>& slots, std::vector<std::pair<int, ExpertWeights>> held) {
  const int num_slots = (int)slots.size();
  std::vector<int32_t> first(num_experts_ + 1, 0), replicas(num_slots);
  for (const int32_t expert : slots) {
    if (expert < 0 || expert >= num_experts_) throw std::invalid_argument("no expert " + std::to_string(expert));
    first[expert + 1]++;
  }
  for (int e = 0; e < num_experts_; e++) {
    if (!first[e + 1]) throw std::invalid_argument("expert " + std::to_string(e) + " has no slot");
    first[e + 1] += first[e];
  }
  std::vector<int32_t> next(first.begin(), first.end() - 1);
  for (int p = 0; p < num_slots; p++) replicas[next[slots[p]]++] = p;

  std::vector<std::unique_ptr<ExpertWeights>> by_slot(num_slots);
  ExpertWeights most;
  int num_held = 0;
  for (auto& [slot, weights] : held) {
    if (slot < 0 || slot >= num_slots) throw std::invalid_argument("no slot " + std::to_string(slot));
    if (num_held++) {
      const bool is_alike = most.gate_up.rows == weights.gate_up.rows && most.gate_up.cols == weights.gate_up.cols &&
                            most.down.rows == weights.down.rows && most.down.cols == weights.down.cols;
      if (!is_alike) throw std::invalid_argument("the expert of slot " + std::to_string(slot) + " has another shape");
    }
    raise(most.gate_up, weights.gate_up);
    raise(most.down, weights.down);
    by_slot[slot] = std::make_unique<ExpertWeights>(std::move(weights));
  }
  std::unique_ptr<std::atomic<int64_t>[]> counts(new std::atomic<int64_t>[num_slots]);
  for (int p = 0; p < num_slots; p++) counts[p].store(0, std::memory_order_relaxed);

  first_ = std::move(first);
  replicas_ = std::move(replicas);
  held_ = std::move(by_slot);
  most_ = std::move(most);
  num_held_ = num_held;
  std::lock_guard<std::mutex> lock(mutex_);
  counts_ = std::move(counts);
  num_counts_ = num_slots;
}

void ExpertTable::take_counts(int64_t* counts, size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (size != num_counts_) throw std::invalid_argument("there are " + std::to_string(num_counts_) + " slots");
  for (size_t p = 0; p < size; p++) counts[p] = counts_[p].exchange(0, std::memory_order_relaxed);
}

// By chunk where each thread may expect at least eight of them; then at most one in eight of its time is spent waiting.
bool MoeLayer::goes_by_chunk(int rows, int num_threads) const {
  if (is_cut) return false;
  const int64_t pairs = (int64_t)rows * routing.num_per_token * table->num_held() / std::max(1, table->num_slots());
  return pairs / kRowChunk + std::min<int64_t>(pairs, table->num_held()) / 2 >= 8 * num_threads;
}

void MoePairs::add(const MoeLayer& layer) {
  layers_.push_back(layer);
  most_per_token_ = std::max(most_per_token_, layer.routing.num_per_token);
  room_per_thread_ = std::max(room_per_thread_, routing_room(layer.routing) + layer.routing.num_per_token);
}

void MoePairs::prepare(int rows, int num_ranks) {
  if (layers_.empty()) return;
  for (const MoeLayer& layer : layers_) {
    const ExpertTable& table = *layer.table;
    if (!table.num_slots()) throw std::runtime_error("a layer's experts are not placed");
    if (num_ranks == 1 && table.num_held() != table.num_slots())
      throw std::runtime_error("one rank alone must hold the experts of all slots");
    const auto &up = table.most().gate_up, &down = table.most().down;
    const bool fits = (!up.rows || (up.rows == 2 * layer.inner_width && up.cols == layer.hidden)) &&
                      (!down.rows || (down.rows <= layer.hidden - layer.output_first && down.cols == layer.inner));
    if (!fits) throw std::runtime_error("a layer's experts are not of the layer's shape");
  }
  const size_t pairs = (size_t)rows * most_per_token_;
  grow(slots_, pairs);
  grow(rows_, pairs);
  grow(weights_, pairs);
  grow(tokens_, pairs);
  grow(room_, (size_t)num_threads_ * room_per_thread_);
}

void MoePairs::route(const Kernels& kernels, const MoeLayer& layer, int thread, const float* scores, int32_t position, int row) {
  float* room = room_.data() + (size_t)thread * room_per_thread_;
  int32_t* slots = slots_.data() + (size_t)row * most_per_token_;
  hr::route(kernels, layer.routing, scores, layer.bias, room, slots, weights_.data() + (size_t)row * most_per_token_);
  for (int i = 0; i < layer.routing.num_per_token; i++) slots[i] = layer.table->slot(slots[i], position);
}

// Sorts the pairs by slot, and by token within a slot. Memory grows here, where no other thread is at work.
void MoePairs::group(const MoeLayer& layer, int rows) {
  ExpertTable& table = *layer.table;
  const int num_slots = table.num_slots(), per_token = layer.routing.num_per_token;
  starts_.assign(num_slots + 1, 0);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < per_token; i++) starts_[slots_[(size_t)r * most_per_token_ + i] + 1]++;
  chunks_.clear();
  for (int p = 0; p < num_slots; p++) {
    const int first = starts_[p], count = starts_[p + 1];
    starts_[p + 1] += first;
    if (!count) continue;
    table.count(p, count);
    for (int i = 0; i < count && table.held(p); i += kRowChunk) chunks_.push_back({p, first + i, std::min(kRowChunk, count - i)});
  }
  next_.assign(starts_.begin(), starts_.end() - 1);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < per_token; i++) {
      const size_t pair = (size_t)r * most_per_token_ + i;
      tokens_[rows_[pair] = next_[slots_[pair]]++] = r;
    }

  const size_t places = (size_t)kRowChunk * (layer.goes_by_chunk(rows, num_threads_) ? num_threads_ : chunks_.size());
  const ExpertWeights& most = table.most();
  grow(up_, places * 2 * layer.inner_width);
  if (most.gate_up.has_floats) grow(x_, places * layer.hidden);
  if (most.gate_up.has_quantized) grow(x_quantized_, places / kRowBlock * groups_of(layer.hidden));
  if (most.down.has_quantized) grow(inner_quantized_, places / kRowBlock * groups_of(layer.inner));
}

void MoePairs::load(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, Rows x) {
  const Chunk& c = chunks_[chunk];
  const auto& stack = weights(layer, chunk).gate_up;
  const Quantized quantized{x_quantized_.data(), groups_of(layer.hidden)};
  for (int i = 0; i < c.count; i++) {
    float* row = x.row(tokens_[c.row + i]);
    if (stack.has_quantized) kernels.quantize({row, 0}, layer.hidden, quantized, place + i, place + i + 1);
    if (stack.has_floats) std::memcpy(x_.data() + (size_t)(place + i) * layer.hidden, row, sizeof(float) * layer.hidden);
  }
}

void MoePairs::multiply_up(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, int tile, int stop) {
  const auto& stack = weights(layer, chunk).gate_up;
  const Quantized all{x_quantized_.data(), groups_of(layer.hidden)};
  const Quantized quantized{stack.has_quantized ? all.at(place) : nullptr, all.num_groups};
  const Rows x{stack.has_floats ? x_.data() + (size_t)place * layer.hidden : nullptr, layer.hidden};
  stacked_linear(kernels, stack.segments, tile, stop, 0, chunks_[chunk].count, &quantized, x, up_rows(layer, place), nullptr);
}

void MoePairs::activate(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, Rows inner) {
  const Rows gate = up_rows(layer, place), up{gate.data + layer.inner_width, gate.stride};
  Rows y = inner_rows(layer, chunk, place, inner);
  if (layer.is_cut) y.data += layer.inner_first;
  kernels.gated(gate, up, layer.inner_width, layer.activation, y, 0, chunks_[chunk].count);
}

void MoePairs::load_inner(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, Rows inner) {
  if (!weights(layer, chunk).down.has_quantized) return;
  const Quantized all{inner_quantized_.data(), groups_of(layer.inner)};
  kernels.quantize(inner_rows(layer, chunk, place, inner), layer.inner, {all.at(place), all.num_groups}, 0, chunks_[chunk].count);
}

void MoePairs::multiply_down(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, int tile, int stop, Rows inner,
                             Rows out) {
  const auto& stack = weights(layer, chunk).down;
  const Quantized all{inner_quantized_.data(), groups_of(layer.inner)};
  const Quantized quantized{stack.has_quantized ? all.at(place) : nullptr, all.num_groups};
  const Rows y{out.row(chunks_[chunk].row) + layer.output_first, out.stride};
  stacked_linear(kernels, stack.segments, tile, stop, 0, chunks_[chunk].count, &quantized,
                 inner_rows(layer, chunk, place, inner), y, nullptr);
}

void MoePairs::combine(const Kernels& kernels, const MoeLayer& layer, int row, Rows out, float* y) const {
  const int per_token = layer.routing.num_per_token;
  const size_t first = (size_t)row * most_per_token_;
  for (int i = 0; i < per_token; i += kMostParts) {
    const float* parts[kMostParts];
    const int count = std::min(kMostParts, per_token - i);
    for (int j = 0; j < count; j++) parts[j] = out.row(rows_[first + i + j]);
    kernels.add_weighted(parts, weights_.data() + first + i, count, layer.hidden, i > 0, y);
  }
}

int Program::pair_buffer(int width, int per_token, bool is_inner) {
  const int turn = num_ranks() > 1 ? (int)num_moe_layers_ % 2 : 0;
  for (const PairBuffer& known : pair_buffers_)
    if (known.width == width && known.per_token == per_token && known.turn == turn && known.is_inner == is_inner &&
        known.behind_logit_rows == behind_logit_rows_)
      return known.buffer;
  pair_buffers_.push_back({width, per_token, turn, is_inner, behind_logit_rows_, add_shared_buffer(width, per_token)});
  return pair_buffers_.back().buffer;
}

void Program::moe(View x, View scores, MoeLayer layer, View out) {
  check_routing(layer.routing);
  if (layer.table->num_experts() != layer.routing.num_experts || scores.width != layer.routing.num_experts)
    throw std::invalid_argument("the layer has another number of experts than its router");
  pairs_.add(layer);
  const int per_token = layer.routing.num_per_token, outputs = pair_buffer(layer.hidden, per_token, false);
  const View output{outputs, 0, layer.hidden};
  const View inner = layer.is_cut ? View{pair_buffer(layer.inner, per_token, true), 0, layer.inner} : output;
  num_moe_layers_++;
  const bool is_behind = behind_logit_rows_;

  push({[=](const Inputs& in, int thread, int, int begin, int end) {
          for (int r = begin; r < end; r++) {
            const int token = is_behind ? in.logit_rows[r] : r;
            pairs_.route(kernels(), layer, thread, rows(scores).row(r), in.positions[token], r);
          }
        },
        {}});
  push_moe([](int) { return 1; }, [=](int, int num_rows, int, int) { pairs_.group(layer, num_rows); });

  // Shares of the work, whose amount is not known before the pairs are grouped.
  const int shares = 16 * pool_.size();
  const auto by_chunk = [=](int num_rows) { return layer.goes_by_chunk(num_rows, pool_.size()); };
  const auto always = [=](int) { return shares; };
  const auto by_step = [=](int num_rows) { return by_chunk(num_rows) ? 0 : shares; };
  const auto part = [=](int share, int64_t work) { return (int)(work * share / shares); };

  push_moe(always, [=](int thread, int num_rows, int begin, int end) {
    const bool is_whole = by_chunk(num_rows);
    const int stop = part(end, pairs_.num_chunks());
    for (int chunk = part(begin, pairs_.num_chunks()); chunk < stop; chunk++) {
      const int place = kRowChunk * (is_whole ? thread : chunk);
      pairs_.load(kernels(), layer, chunk, place, rows(x));
      if (!is_whole) continue;
      pairs_.multiply_up(kernels(), layer, chunk, place, 0, layer.table->most().gate_up.tiles);
      pairs_.activate(kernels(), layer, chunk, place, rows(inner));
      pairs_.load_inner(kernels(), layer, chunk, place, rows(inner));
      pairs_.multiply_down(kernels(), layer, chunk, place, 0, layer.table->most().down.tiles, rows(inner), rows(output));
    }
  });
  // Calls work(chunk, tile, stop) for the tiles of a range of shares.
  const auto each_tile = [=](int tiles, int begin, int end, auto work) {
    const int64_t all = (int64_t)pairs_.num_chunks() * tiles;
    int64_t at = all * begin / shares;
    for (const int64_t last = all * end / shares; at < last;) {
      const int chunk = (int)(at / tiles), tile = (int)(at % tiles), stop = (int)std::min<int64_t>(tiles, tile + last - at);
      work(chunk, tile, stop);
      at += stop - tile;
    }
  };
  push_moe(by_step, [=](int, int, int begin, int end) {
    each_tile(layer.table->most().gate_up.tiles, begin, end, [&](int chunk, int tile, int stop) {
      pairs_.multiply_up(kernels(), layer, chunk, kRowChunk * chunk, tile, stop);
    });
  });
  push_moe(by_step, [=](int, int, int begin, int end) {
    const int stop = part(end, pairs_.num_chunks());
    for (int chunk = part(begin, pairs_.num_chunks()); chunk < stop; chunk++) {
      pairs_.activate(kernels(), layer, chunk, kRowChunk * chunk, rows(inner));
      if (!layer.is_cut) pairs_.load_inner(kernels(), layer, chunk, kRowChunk * chunk, rows(inner));
    }
  });
  if (layer.is_cut) {
    barrier();
    push_moe(by_step, [=](int, int, int begin, int end) {
      const int stop = part(end, pairs_.num_chunks());
      for (int chunk = part(begin, pairs_.num_chunks()); chunk < stop; chunk++)
        pairs_.load_inner(kernels(), layer, chunk, kRowChunk * chunk, rows(inner));
    });
  }
  push_moe(by_step, [=](int, int, int begin, int end) {
    each_tile(layer.table->most().down.tiles, begin, end, [&](int chunk, int tile, int stop) {
      pairs_.multiply_down(kernels(), layer, chunk, kRowChunk * chunk, tile, stop, rows(inner), rows(output));
    });
  });
  if (num_ranks() > 1) barrier();
  push({[=](const Inputs&, int, int, int begin, int end) {
          for (int r = begin; r < end; r++) pairs_.combine(kernels(), layer, r, rows(output), rows(out).row(r));
        },
        {}});
}

// A command whose units are not rows; none where there are no rows.
void Program::push_moe(std::function<int(int rows)> num_units, std::function<void(int thread, int rows, int begin, int end)> work) {
  Command command;
  command.is_row_work = false;
  command.shares_per_thread = 16;
  command.num_units = [=](const Inputs&, int num_rows) { return num_rows ? num_units(num_rows) : 0; };
  command.work = [=](const Inputs&, int thread, int num_rows, int begin, int end) { work(thread, num_rows, begin, end); };
  push(std::move(command));
}

void Program::gate_rows(View x, View gate, View out) {
  push({[=](const Inputs&, int, int, int begin, int end) {
          for (int r = begin; r < end; r++) {
            float factor;
            kernels().sigmoid(rows(gate).row(r), 1, &factor);
            kernels().scale(rows(x), x.width, factor, rows(out), r, r + 1);
          }
        },
        {}});
}

}  // namespace hr
