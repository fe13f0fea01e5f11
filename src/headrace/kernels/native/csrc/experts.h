// Mixture of experts: what each physical slot of a layer holds, and the pairs of a step, each a token with one of its experts.
//
// A token's k experts are chosen by its row alone. Pairs are then put in the order of slots, so that the rows of one slot lie
// side by side and its weights are read once per chunk of 16 rows; that order is the same on every rank, whoever computes a
// slot. Chunks come in two ways, with the same bits: where there are many, a unit of work is a chunk, from its inputs to the
// output of its expert, in memory that stays in the core's cache; where there are few, each of the steps of all chunks is cut
// into equal shares of tiles, so that all cores read weights.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "routing.h"
#include "stack.h"

namespace hr {

struct ExpertWeights {  // one expert's matrices as this rank has them; either may have no part
  struct Stack {
    std::vector<Segment> segments;
    int tiles = 0, rows = 0, cols = 0;
    bool has_quantized = false, has_floats = false;
    void push(const Weight* weight);
  };
  Stack gate_up, down;
};

// One layer's experts by slot. An expert with several slots has replicas: a token at position t goes to replica t modulo
// their number. All but take_counts() is for the thread that runs steps, between them.
class ExpertTable {
 public:
  explicit ExpertTable(int num_experts) : num_experts_(num_experts) {}
  // slots[p]: the expert of slot p; `held`: the slots that this rank computes. Throws std::invalid_argument, and then
  // everything is as before. Counts begin anew.
  void place(const std::vector<int32_t>& slots, std::vector<std::pair<int, ExpertWeights>> held);
  // Tokens per slot since the last call. Any thread. Throws std::invalid_argument unless there is room for all slots.
  void take_counts(int64_t* counts, size_t size);

  int num_experts() const { return num_experts_; }
  int num_slots() const { return (int)held_.size(); }
  int num_held() const { return num_held_; }
  int slot(int32_t expert, int32_t position) const {
    const int first = first_[expert];
    return replicas_[first + position % (first_[expert + 1] - first)];
  }
  const ExpertWeights* held(int slot) const { return held_[slot] ? held_[slot].get() : nullptr; }
  const ExpertWeights& most() const { return most_; }  // the most of each number that a held slot has, without parts
  void count(int slot, int tokens) { counts_[slot].fetch_add(tokens, std::memory_order_relaxed); }

 private:
  const int num_experts_;
  int num_held_ = 0;
  std::vector<std::unique_ptr<ExpertWeights>> held_;
  std::vector<int32_t> first_, replicas_;  // of expert e: replicas_[first_[e]] up to first_[e + 1]
  ExpertWeights most_;
  std::mutex mutex_;  // of the array of counts, which a step may add to meanwhile
  std::unique_ptr<std::atomic<int64_t>[]> counts_;
  size_t num_counts_ = 0;
};

// One layer as it is recorded.
struct MoeLayer {
  ExpertTable* table;
  Routing routing;
  const float* bias;  // or nullptr
  Activation activation;
  int hidden, inner;                  // D and F
  bool is_cut;                        // every rank has a part of each expert
  int inner_first, inner_width;       // this rank's columns of F
  int output_first;                   // and its first one of D
  // How work is cut; the same for all of a step.
  bool goes_by_chunk(int rows, int num_threads) const;
};

// The pairs of the layer that runs now, and their rows on the way through the experts. One for all layers of a program.
class MoePairs {
 public:
  explicit MoePairs(int num_threads) : num_threads_(num_threads) {}
  void add(const MoeLayer& layer);
  // Throws std::runtime_error where a layer's experts are not placed, or not of the layer's shape.
  void prepare(int rows, int num_ranks);

  void route(const Kernels& kernels, const MoeLayer& layer, int thread, const float* scores, int32_t position, int row);
  void group(const MoeLayer& layer, int rows);  // one unit
  int num_chunks() const { return (int)chunks_.size(); }
  // Steps of a chunk, whose rows lie in this memory from row `place` on, a multiple of 16. `inner` and `out` have a row per
  // pair, in the order of slots; `inner` is for experts that are cut.
  void load(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, Rows x);
  void multiply_up(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, int tile, int stop);
  void activate(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, Rows inner);
  void load_inner(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, Rows inner);
  void multiply_down(const Kernels& kernels, const MoeLayer& layer, int chunk, int place, int tile, int stop, Rows inner, Rows out);
  void combine(const Kernels& kernels, const MoeLayer& layer, int row, Rows out, float* y) const;

 private:
  struct Chunk {
    int slot, row, count;  // rows in the order of slots
  };
  const ExpertWeights& weights(const MoeLayer& layer, int chunk) const { return *layer.table->held(chunks_[chunk].slot); }
  Rows up_rows(const MoeLayer& layer, int place) {
    return {up_.data() + (size_t)place * 2 * layer.inner_width, 2 * layer.inner_width};
  }
  // Where the activated rows are: for experts that are cut in `inner`, else in place of the gates.
  Rows inner_rows(const MoeLayer& layer, int chunk, int place, Rows inner) {
    return layer.is_cut ? Rows{inner.row(chunks_[chunk].row), inner.stride} : up_rows(layer, place);
  }

  const int num_threads_;
  std::vector<MoeLayer> layers_;
  int most_per_token_ = 0;       // pairs of token t begin at t times this
  std::vector<float> room_;      // of each thread, for routing
  int room_per_thread_ = 0;
  std::vector<int32_t> slots_, rows_;  // of each pair: its slot, its row in the order of slots
  std::vector<float> weights_;
  std::vector<int32_t> tokens_;        // of each row in the order of slots
  std::vector<int32_t> starts_, next_;
  std::vector<Chunk> chunks_;
  std::vector<float> x_, up_;
  std::vector<QuantizedGroup> x_quantized_, inner_quantized_;
};

}  // namespace hr
