// The Python module `headrace.kernels.native._native`: packed weights, KV memory, the thread pool and recorded programs.
// Arrays are checked here, once, so that the kernels may trust them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <stdexcept>
#include <string>

#include "draw.h"
#include "limits.h"
#include "pack.h"
#include "program.h"

namespace nb = nanobind;
using namespace hr;

namespace {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T, int Dims>
using Out = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using ViewTuple = std::tuple<int, int, int>;
// logits, best and finite; see StepOutputs in kernels/ops.py
using OutputTuple = std::tuple<Out<float, 2>, Out<int64_t, 1>, Out<bool, 1>>;
// rows of the step, and where their hidden states go
using HiddenTuple = std::tuple<Array1<int32_t>, Out<float, 2>>;
// row, best, temperature, top_k, top_p, min_p, chance; see Draw in kernels/ops.py
using DrawTuple = std::tuple<Array1<float>, int, double, int, double, double, double>;

// KV memory of all layers; a block that was never used costs no memory.
class KVMemory {
 public:
  KVMemory(int layers, int kv_heads, int head_dim, int num_blocks, int block_size, bool int8)
      : shape_{nullptr, nullptr, nullptr, nullptr, kv_heads, head_dim, block_size, (size_t)layers * 2 * kv_heads * kExtent},
        layers_(layers), block_bytes_((size_t)(head_dim + 15) / 16 * 16 * block_size * (int8 ? 1 : 2)) {
    if (block_size % 16) throw std::invalid_argument("block_size must be a multiple of 16");
    const size_t blocks = (size_t)((num_blocks + kExtent - 1) / kExtent) * shape_.extent_stride;
    memory_ = Memory(blocks * block_bytes_, true);
    if (int8) scales_ = Memory(blocks * block_size * sizeof(float), true);
  }
  KVLayer layer(int i) const {
    const size_t half = (size_t)shape_.kv_heads * kExtent, first = 2 * i * half;
    KVLayer l = shape_;
    l.k = memory_.data() + first * block_bytes_;
    l.v = memory_.data() + (first + half) * block_bytes_;
    if (scales_.data()) {
      l.k_scale = (float*)scales_.data() + first * shape_.block_size;
      l.v_scale = l.k_scale + half * shape_.block_size;
    }
    return l;
  }
  int layers() const { return layers_; }
  size_t bytes() const { return memory_.bytes() + scales_.bytes(); }

 private:
  KVLayer shape_;
  int layers_;
  size_t block_bytes_;
  Memory memory_, scales_;
};

Weight pack_blocks(Arena& arena, const std::string& kind, Array1<uint8_t> data, int rows, int cols) {
  const size_t groups = (size_t)rows * (cols / kGroup), supers = (size_t)rows * (cols / 256);
  const auto expect = [&](size_t bytes) {
    if (data.size() != bytes) throw std::invalid_argument("wrong number of bytes for " + kind);
  };
  nb::gil_scoped_release release;
  if (kind == "Q4_0") return expect(groups * 18), pack_q4_0(arena, data.data(), rows, cols);
  if (kind == "Q4_1") return expect(groups * 20), pack_q4_1(arena, data.data(), rows, cols);
  if (kind == "Q8_0") return expect(groups * 34), pack_q8_0(arena, data.data(), rows, cols);
  if (kind == "Q4_K") return expect(supers * 144), pack_q4_k(arena, data.data(), rows, cols);
  if (kind == "F16" || kind == "BF16") {
    expect((size_t)rows * cols * 2);
    return pack_half(arena, data.data(), rows, cols, kind == "F16" ? WeightKind::f16 : WeightKind::bf16);
  }
  throw std::invalid_argument("no packing for " + kind);
}

Weight pack_floats(Arena& arena, const std::string& kind, Array2<float> values) {
  const int rows = (int)values.shape(0), cols = (int)values.shape(1);
  nb::gil_scoped_release release;
  if (kind == "w8") return pack_w8(arena, values.data(), rows, cols);
  if (kind == "w4") return pack_w4(arena, values.data(), rows, cols);
  if (kind == "f32") return pack_f32(arena, values.data(), rows, cols);
  throw std::invalid_argument("no packing for " + kind);
}

Weight blank_of(const std::string& kind, int rows, int cols) {
  for (const WeightKind known : {WeightKind::w4, WeightKind::w8, WeightKind::f16, WeightKind::bf16, WeightKind::f32})
    if (kind == kind_name(known)) return blank(known, rows, cols);
  throw std::invalid_argument("no packing for " + kind);
}

std::vector<int> draw(Pool& pool, const std::vector<DrawTuple>& draws) {
  std::vector<int> token_ids(draws.size());
  for (const auto& draw : draws) {
    const int best = std::get<1>(draw);
    if (best < 0 || (size_t)best >= std::get<0>(draw).size()) throw std::invalid_argument("the best token is not in its row");
  }
  nb::gil_scoped_release release;
  pool.for_each((int)draws.size(), [&](int i) {
    const auto& [row, best, temperature, top_k, top_p, min_p, chance] = draws[i];
    token_ids[i] = draw_token({row.data(), best, temperature, top_k, top_p, min_p, chance}, (int)row.size());
  });
  return token_ids;
}

View view(ViewTuple v) { return {std::get<0>(v), std::get<1>(v), std::get<2>(v)}; }

// Python's side of a layer's experts: keeps alive what its slots point to.
class PyExperts {
 public:
  using Weights = std::vector<nb::object>;
  explicit PyExperts(int num_experts) : table(num_experts) {}
  ExpertTable table;

  void place(Array1<int32_t> slots, const std::vector<std::tuple<int, Weights, Weights>>& held) {
    std::vector<nb::object> kept;
    std::vector<std::pair<int, ExpertWeights>> weights;
    for (const auto& [slot, gate_up, down] : held) {
      ExpertWeights expert;
      for (const auto& part : gate_up) expert.gate_up.push(nb::cast<const Weight*>(kept.emplace_back(part)));
      for (const auto& part : down) expert.down.push(nb::cast<const Weight*>(kept.emplace_back(part)));
      weights.emplace_back(slot, std::move(expert));
    }
    table.place({slots.data(), slots.data() + slots.size()}, std::move(weights));
    kept_ = std::move(kept);
  }

 private:
  std::vector<nb::object> kept_;
};

// Python's side of a program: keeps alive what its commands point to.
class PyProgram {
 public:
  explicit PyProgram(Pool& pool, Group* group) : program(pool, group) {}
  PyProgram(const PyProgram&) = delete;
  Program program;

  const float* keep(Array1<float> values) {
    kept_.emplace_back(values.data(), values.data() + values.size());
    return kept_.back().data();
  }
  void linear(ViewTuple x, int quantized, const std::vector<std::pair<nb::object, int>>& parts,
              const std::vector<nb::object>& biases, ViewTuple residual, ViewTuple out) {
    if (parts.size() != biases.size()) throw std::invalid_argument("as many biases as parts are needed; None counts");
    std::vector<Segment> segments;
    for (size_t i = 0; i < parts.size(); i++) {
      const auto& [weight, offset] = parts[i];
      const float* bias = biases[i].is_none() ? nullptr : keep(nb::cast<Array1<float>>(biases[i]));
      segments.push_back({nb::cast<const Weight*>(weight), offset, bias});
      weights_.push_back(weight);
    }
    program.linear(view(x), quantized, std::move(segments), view(residual), view(out));
  }
  void head(ViewTuple x, int quantized, nb::object weight, nb::object bias, ViewTuple out) {
    const float* values = bias.is_none() ? nullptr : keep(nb::cast<Array1<float>>(bias));
    program.head(view(x), quantized, {nb::cast<const Weight*>(weight), 0, values}, view(out));
    weights_.push_back(weight);
  }
  void moe(ViewTuple x, ViewTuple scores, PyExperts& experts, const Routing& routing, nb::object bias, Activation activation,
           int inner_size, const std::vector<int>& inner_sizes, const std::vector<int>& output_sizes, ViewTuple out) {
    const int ranks = program.num_ranks(), rank = program.rank();
    const auto sum_of = [](const std::vector<int>& sizes, int count) {
      return std::accumulate(sizes.begin(), sizes.begin() + count, 0);
    };
    const bool is_cut = !inner_sizes.empty();
    if (is_cut != !output_sizes.empty()) throw std::invalid_argument("experts are cut in both of their products or in none");
    if (is_cut && ((int)inner_sizes.size() != ranks || (int)output_sizes.size() != ranks ||
                   sum_of(inner_sizes, ranks) != inner_size || sum_of(output_sizes, ranks) != view(out).width))
      throw std::invalid_argument("the ranks' parts of the experts do not add up to the experts");
    const float* values = nullptr;
    if (!bias.is_none()) {
      const auto array = nb::cast<Array1<float>>(bias);
      if ((int)array.size() != routing.num_experts) throw std::invalid_argument("the router's bias has a number per expert");
      values = keep(array);
    }
    program.moe(view(x), view(scores),
                {&experts.table, routing, values, activation, view(x).width, inner_size, is_cut,
                 is_cut ? sum_of(inner_sizes, rank) : 0, is_cut ? inner_sizes[rank] : inner_size,
                 is_cut ? sum_of(output_sizes, rank) : 0},
                view(out));
  }
  void run(Array1<int32_t> token_ids, Array1<int32_t> positions, Array1<int64_t> kv_slots, Array1<int32_t> query_starts,
           Array1<int32_t> context_lens, Array2<int32_t> block_tables, Array1<int32_t> logit_rows,
           const OutputTuple& outputs, const std::optional<HiddenTuple>& hidden) {
    const auto& [logits, best, finite] = outputs;
    Inputs inputs{(int)token_ids.size(), (int)context_lens.size(), (int)logit_rows.size(), (int)block_tables.shape(1),
                  token_ids.data(),      positions.data(),         query_starts.data(),    context_lens.data(),
                  block_tables.data(),   logit_rows.data(),        kv_slots.data()};
    const size_t tokens = token_ids.size(), sequences = context_lens.size();
    if (positions.size() != tokens || kv_slots.size() != tokens || query_starts.size() != sequences + 1 ||
        block_tables.shape(0) != sequences || logits.shape(0) != logit_rows.size() ||
        best.size() != logit_rows.size() || finite.size() != logit_rows.size())
      throw std::invalid_argument("the step's arrays do not fit together");
    float* states = nullptr;
    if (hidden) {
      const auto& [rows, out] = *hidden;
      if (out.shape(0) != rows.size() || (int)out.shape(1) != program.hidden_width())
        throw std::invalid_argument("the hidden states have no room");
      inputs.num_hidden = (int)rows.size();
      inputs.hidden_rows = rows.data();
      states = out.data();
    }
    nb::gil_scoped_release release;
    program.run(inputs, {logits.data(), best.data(), finite.data(), states});
  }

 private:
  std::deque<std::vector<float>> kept_;
  std::vector<nb::object> weights_;
};

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a program that ends in the middle owes nobody an account
  nb::class_<Weight>(m, "Weight")
      .def_ro("rows", &Weight::rows)
      .def_ro("cols", &Weight::cols)
      .def_prop_ro("kind", [](const Weight& w) { return std::string(kind_name(w.kind)); })
      .def_prop_ro("is_quantized", [](const Weight& w) { return w.kind == WeightKind::w4 || w.kind == WeightKind::w8; })
      .def_prop_ro("num_bytes", [](const Weight& w) { return (size_t)w.tiles * w.tile_bytes; })
      .def_prop_ro("data", [](Weight& w) {
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(w.data, {(size_t)w.tiles * w.tile_bytes}, nb::find(w));
          });
  nb::class_<Group>(m, "Group")
      .def(nb::init<int, int, int>())
      .def_ro_static("num_bytes", &Group::kBytes)
      .def_ro_static("moves_bytes", &Group::kMoves)
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def_prop_ro("posted", &Group::posted)
      .def_prop_ro("has_failed", &Group::has_failed)
      .def("barrier", &Group::barrier, nb::call_guard<nb::gil_scoped_release>())
      .def("post", &Group::post)
      .def("wait", &Group::wait, nb::arg(), nb::arg(), nb::call_guard<nb::gil_scoped_release>())
      .def("fail", &Group::fail)
      .def("mailbox", [](Group& g, uint32_t number, size_t bytes) {
            if (bytes > Group::kMailbox) throw std::bad_alloc();
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(g.mailbox(number), {bytes}, nb::find(g));
          })
      .def("logits", [](Group& g, size_t rows, size_t width) {
            if (rows * width * sizeof(float) > Group::kLogits) throw std::bad_alloc();
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(g.logits(), {rows, width}, nb::find(g));
          })
      .def("trim_logits", &Group::trim_logits)
      .def_prop_ro("moves", [](Group& g) {
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(g.moves(), {Group::kMoves}, nb::find(g));
          });
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<Pool>(m, "Pool").def(nb::init<int, bool>()).def_prop_ro("size", &Pool::size);
  nb::class_<KVMemory>(m, "KVMemory").def(nb::init<int, int, int, int, int, bool>()).def_prop_ro("num_bytes", &KVMemory::bytes);
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh);
  nb::class_<Routing>(m, "Routing")
      .def("__init__", [](Routing* r, int num_experts, int num_per_token, bool is_sigmoid, bool is_normalised, float norm_floor,
                          float scale, std::tuple<int, int, int> groups) {
            const auto [num_groups, num_used, num_per_score] = groups;
            new (r) Routing{num_experts, num_per_token, is_sigmoid, is_normalised, norm_floor, scale, num_groups, num_used, num_per_score};
          }, nb::kw_only(), nb::arg("num_experts"), nb::arg("num_per_token"), nb::arg("is_sigmoid"), nb::arg("is_normalised"),
           nb::arg("norm_floor"), nb::arg("scale"), nb::arg("groups"));
  nb::class_<PyExperts>(m, "Experts")
      .def(nb::init<int>())
      .def("place", &PyExperts::place)
      .def("take_counts", [](PyExperts& e, Out<int64_t, 1> counts) { e.table.take_counts(counts.data(), counts.size()); });
  m.def("pack_blocks", &pack_blocks, "A weight from the bytes of a GGUF or half-precision tensor [rows, cols].");
  m.def("pack_floats", &pack_floats, "A weight from float32 [rows, cols], as w8, w4 or f32.");
  m.def("blank", &blank_of, "A weight of zeros, for bytes that are copied into its `data` from one of the same shape and kind.");
  m.def("unpack", [](const Weight& w, Out<float, 2> values) {
    if ((int)values.shape(0) != w.rows || (int)values.shape(1) != w.cols) throw std::invalid_argument("not the weight's shape");
    nb::gil_scoped_release release;
    std::vector<int32_t> ids(w.rows);
    std::iota(ids.begin(), ids.end(), 0);
    best_kernels()->embed(w, ids.data(), {values.data(), w.cols}, 0, w.rows);
  }, "What a weight stands for, as float32 [rows, cols].");
  m.def("draw", &draw, "One token per draw.");
  m.def("measure_limits", [](Pool& pool) {
    const Limits limits = measure_limits(pool);
    return std::make_pair(limits.read_bytes_per_s, limits.int8_ops_per_s);
  });
  m.def("instruction_set", [] { return std::string(best_kernels()->name); });
  m.def("force_instruction_set", &force_kernels, "For tests: portable, avx2 or avx512; empty: the best. False if it is not there.");

  nb::class_<PyProgram>(m, "Program")
      .def(nb::init<Pool&, Group*>(), nb::arg(), nb::arg().none() = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("add_shared_buffer", [](PyProgram& p, int width, int rows_per_token, int extra_rows) {
            return p.program.add_shared_buffer(width, rows_per_token, extra_rows);
          }, nb::arg(), nb::arg() = 1, nb::arg() = 0)
      .def("barrier", [](PyProgram& p) { p.program.barrier(); })
      .def_prop_ro("rank", [](const PyProgram& p) { return p.program.rank(); })
      .def_prop_ro("num_ranks", [](const PyProgram& p) { return p.program.num_ranks(); })
      .def("add_buffer", [](PyProgram& p, int width) { return p.program.add_buffer(width); })
      .def("add_quantized", [](PyProgram& p, int cols) { return p.program.add_quantized(cols); })
      .def("add_rope_table", [](PyProgram& p, const std::vector<float>& f, float s) { return p.program.add_rope_table(f, s); })
      .def("use_kv", [](PyProgram& p, KVMemory& kv) {
            p.program.clear_kv();
            for (int i = 0; i < kv.layers(); i++) p.program.add_kv_layer(kv.layer(i));
          }, nb::keep_alive<1, 2>())
      .def("embed", [](PyProgram& p, const Weight* w, int first, ViewTuple out) { p.program.embed(w, first, view(out)); },
           nb::keep_alive<1, 2>())
      .def("scale", [](PyProgram& p, ViewTuple x, float f, ViewTuple out) { p.program.scale(view(x), f, view(out)); })
      .def("add", [](PyProgram& p, ViewTuple x, ViewTuple y, ViewTuple out) { p.program.add(view(x), view(y), view(out)); })
      .def("rms_norm", [](PyProgram& p, ViewTuple x, int heads, Array1<float> weight, float eps, ViewTuple out) {
            p.program.rms_norm(view(x), heads, p.keep(weight), eps, view(out));
          })
      .def("quantize", [](PyProgram& p, ViewTuple x, int index) { p.program.quantize(view(x), index); })
      .def("linear", &PyProgram::linear, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("head", &PyProgram::head, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("rope", [](PyProgram& p, ViewTuple x, int heads, int table, int rotary, bool interleaved, ViewTuple out) {
            p.program.rope(view(x), heads, table, rotary, interleaved, view(out));
          })
      .def("attention", [](PyProgram& p, ViewTuple q, ViewTuple k, ViewTuple v, int layer, int heads, float scale, float cap,
                           int window, ViewTuple out) {
            p.program.attention(view(q), view(k), view(v), layer, {heads, scale, cap, window}, view(out));
          })
      .def("gated", [](PyProgram& p, ViewTuple g, ViewTuple u, Activation a, ViewTuple out) {
            p.program.gated(view(g), view(u), a, view(out));
          })
      .def("moe", &PyProgram::moe, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::keep_alive<1, 4>())
      .def("gate_rows", [](PyProgram& p, ViewTuple x, ViewTuple gate, ViewTuple out) {
            p.program.gate_rows(view(x), view(gate), view(out));
          })
      .def("logit_rows", [](PyProgram& p, ViewTuple x) {
            // the buffer is made here, since it is the first that has the wanted rows alone
            return p.program.logit_rows(view(x));
          })
      .def("soft_cap", [](PyProgram& p, ViewTuple x, float cap, ViewTuple out) { p.program.soft_cap(view(x), cap, view(out)); })
      .def("output", [](PyProgram& p, ViewTuple x) { p.program.output(view(x)); })
      .def("result", [](PyProgram& p, ViewTuple x) { p.program.result(view(x)); })
      .def("hidden", [](PyProgram& p, ViewTuple x, Array1<float> weight, float eps) {
            p.program.hidden(view(x), p.keep(weight), eps);
          })
      .def("run", &PyProgram::run, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg() = nb::none())
      .def_prop_ro("attention_bytes", [](const PyProgram& p) { return p.program.attention_bytes(); });
}
