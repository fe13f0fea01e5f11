// A recorded step: a list of commands over buffers, run for any number of rows by a pool of threads.
// The recorder (recorder.py) appends commands once; run() replays them. Buffers grow to the most rows that were seen.
#pragma once
#include <deque>
#include <vector>

#include "experts.h"
#include "group.h"
#include "kernels.h"
#include "pool.h"
#include "stack.h"

namespace hr {

struct View {  // columns [offset, offset + width) of a buffer
  int buffer, offset, width;
};

// One step's arrays; see StepInputs in kernels/ops.py.
struct Inputs {
  int num_tokens, num_sequences, num_logits, table_width;
  const int32_t *token_ids, *positions, *query_starts, *context_lens, *block_tables, *logit_rows;
  const int64_t* kv_slots;
  int num_hidden = 0;
  const int32_t* hidden_rows = nullptr;
};

// What a step gives: logits, the first largest of each row, and whether the row is finite; where not, best means nothing.
struct Outputs {
  float* logits;
  int64_t* best;
  bool* is_finite;
  float* hidden = nullptr;  // the rows that `hidden` hands out
};

constexpr size_t kMostPartBytes = 8u << 20;  // of attention's parts

class Program : private Job {
 public:
  // `group`: the ranks that run the same program together, or nullptr for one alone
  explicit Program(Pool& pool, Group* group = nullptr) : pool_(pool), group_(group), pairs_(pool.size()) {}
  ~Program() { pool_.settle(); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  // Rows are those of the step times `rows_per_token`, plus `extra_rows`.
  int add_buffer(int width, int rows_per_token = 1, int extra_rows = 0);
  // One that all ranks see. Each writes its part; who reads the others' does so behind a barrier.
  int add_shared_buffer(int width, int rows_per_token = 1, int extra_rows = 0);
  void barrier();
  int rank() const { return group_ ? group_->rank() : 0; }
  int num_ranks() const { return group_ ? group_->size() : 1; }
  void add_kv_layer(KVLayer layer) { kv_.push_back(layer); }
  bool has_kv() const { return !kv_.empty(); }
  void clear_kv() { kv_.clear(); }

  // `first`: the token id of the table's first row. Rows of tokens outside the table are another rank's to write.
  void embed(const Weight* table, int first, View out);
  void scale(View x, float factor, View out);
  void add(View x, View y, View out);
  void rms_norm(View x, int heads, const float* weight, float eps, View out);
  void quantize(View x, int quantized);
  int add_quantized(int cols);
  // residual.buffer < 0: none; quantized < 0: float input
  void linear(View x, int quantized, std::vector<Segment> segments, View residual, View out);
  void rope(View x, int heads, int table, int rotary, bool interleaved, View out);
  int add_rope_table(std::vector<float> inv_freq, float attention_scale);
  void attention(View q, View k, View v, int layer, AttentionArgs args, View out);
  void gated(View gate, View up, Activation activation, View out);
  // The chosen experts' outputs, weighted. The layer's table must be placed before the first run, and outlive the program.
  void moe(View x, View scores, MoeLayer layer, View out);
  void gate_rows(View x, View gate, View out);  // times the sigmoid of one number per row
  void hidden(View x, const float* weight, float eps);  // norms the rows whose hidden states are wanted, into the caller's memory
  int hidden_width() const { return hidden_width_; }    // 0: there are none to be had
  int logit_rows(View x);  // returns the buffer of the wanted rows; commands that follow run on these alone
  void soft_cap(View x, float cap, View out);
  void head(View x, int quantized, Segment weight, View out);  // a linear layer whose result is the output
  void output(View x);  // a whole buffer, written last
  void result(View x) { output_ = x.buffer; }  // likewise, on a rank that nobody asks for it

  // Not thread-safe. Throws when another rank has failed.
  void run(const Inputs& inputs, const Outputs& outputs);
  size_t attention_bytes() const { return parts_.capacity() * sizeof(float); }

 private:
  const Kernels& kernels() const { return *best_kernels(); }
  struct Command {
    // does units [begin, end); rows is T, or R behind logit_rows
    std::function<void(const Inputs&, int rank, int rows, int begin, int end)> work;
    std::function<int(const Inputs&, int rows)> num_units;
    bool is_row_work = true;
    bool wants_logit_rows = false;
    int shares_per_thread = 4;
  };
  void push(Command command);
  void open(uint32_t generation) override;
  void help(int rank, uint32_t generation) override;
  Rows rows(View v) { return {buffers_[v.buffer].data + v.offset, buffers_[v.buffer].width}; }
  Quantized quantized(int index);
  void prepare(const Inputs& inputs);

  Pool& pool_;
  Group* const group_;
  struct Buffer {
    int width, rows_per_token, extra_rows;
    bool behind_logit_rows, is_shared;
    std::vector<float> memory;
    float* data;  // into memory, the group's heap, or the caller's logits
  };
  std::deque<Buffer> buffers_;
  struct QuantizedBuffer {
    int groups;
    bool behind_logit_rows;
    std::vector<QuantizedGroup> memory;
  };
  std::deque<QuantizedBuffer> quantized_;
  struct RopeTable {
    std::vector<float> inv_freq;
    float attention_scale;
    std::vector<float> cos, sin;
  };
  std::deque<RopeTable> rope_tables_;
  std::vector<KVLayer> kv_;
  std::vector<Command> commands_;
  std::deque<Slot> slots_;          // one per command
  const Inputs* inputs_ = nullptr;  // of the step that runs
  Outputs outputs_{};
  std::vector<float> peaks_;  // of the pieces of each row of logits
  int peaks_per_row_ = 0;
  bool has_peaks_ = false;  // the output's own command makes them

  // Attention, in attention.cpp. Its units are the spans of each row; starts says where each row's begin, one more at the end.
  struct Span {
    int32_t row, first, last;
  };
  struct Spans {
    int window;
    std::vector<Span> spans;
    std::vector<int32_t> starts;
  };
  struct Attention {
    View q, out;
    int layer;
    size_t kind;  // of spans
    AttentionArgs args;
    int head_dim;
  };
  size_t spans_kind(int window);
  void prepare_attention(const Inputs& inputs);
  void attend_span(const Inputs& inputs, const Attention& it, const Span& span, int g, float* part);
  void attend_row(const Inputs& inputs, const Attention& it, int row, int g, float* parts);
  std::vector<Spans> spans_;          // one per window size that a layer has
  std::vector<int32_t> sequence_of_;  // per token
  std::vector<float> parts_;          // of the attention that runs now
  size_t floats_per_span_ = 0;        // the most that any layer needs per row and span
  size_t floats_per_rank_ = 0;        // where attends_by_row_
  bool attends_by_row_ = false;

  // Experts, in experts.cpp. A layer's outputs of pairs must not be written while another rank may still read those of the
  // layer before: with ranks there are two buffers, in turn.
  void push_moe(std::function<int(int rows)> num_units, std::function<void(int thread, int rows, int begin, int end)> work);
  int pair_buffer(int width, int per_token, bool is_inner);
  struct PairBuffer {
    int width, per_token, turn;
    bool is_inner, behind_logit_rows;
    int buffer;
  };
  std::vector<PairBuffer> pair_buffers_;
  MoePairs pairs_;
  int num_moe_layers_ = 0;

  bool behind_logit_rows_ = false;
  int hidden_width_ = 0;
  int output_ = -1;
};

}  // namespace hr
