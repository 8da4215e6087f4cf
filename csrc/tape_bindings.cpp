// Building a tape from Python: headrace/backend/lower.py calls one method per record. Each checks that the buffers it
// joins agree and are large enough for the tape's largest step.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "tape.h"

namespace headrace {
namespace {

using SharedMatrix = std::shared_ptr<Matrix>;
using SharedActivations = std::shared_ptr<ActivationBuffer>;
using Gain = std::optional<Array<const float>>;

const float* keep_gain(Tape& tape, const Gain& gain, int64_t count) {
  if (!gain) return nullptr;
  require(static_cast<int64_t>(gain->size()) == count, "gain or bias: wrong length");
  return tape.keep_floats(gain->data(), gain->size());
}

Domain row_domain(const Tape& tape, bool output_rows, int64_t rows) {
  require(rows >= (output_rows ? tape.max_rows() : tape.max_tokens()),
          "a buffer is smaller than the tape's largest step");
  return output_rows ? Domain::kOutputRows : Domain::kTokens;
}

Record record_of(Kind kind) {
  Record record = {};
  record.kind = kind;
  return record;
}

void add_embed(Tape& tape, const Array<const uint8_t>& rows, int32_t type, int32_t k, float scale,
               const SharedMatrix& out) {
  Record record = record_of(Kind::kEmbed);
  record.embed = {source_rows(rows, type, k), scale, out->data(), out->stride()};
  require(record.embed.table.n >= tape.vocab() && k == tape.hidden() && out->width() == k, "embed: sizes differ");
  tape.keep(std::make_shared<Array<const uint8_t>>(rows));
  tape.keep(out);
  tape.add(row_domain(tape, false, out->rows()), record);
}

void add_angles(Tape& tape, const std::vector<float>& inv_freq, float scale, const SharedMatrix& out) {
  Record record = record_of(Kind::kAngles);
  const int32_t half = static_cast<int32_t>(inv_freq.size());
  require(out->stride() == 2 * half, "angles: the buffer is not [tokens, rotary_dim]");
  record.angles = {tape.keep_floats(inv_freq.data(), inv_freq.size()), half, scale, out->data()};
  tape.keep(out);
  tape.add(row_domain(tape, false, out->rows()), record);
}

void add_norm_quant(Tape& tape, const SharedMatrix& x, const Gain& gain, float eps, const SharedActivations& out,
                    bool output_rows) {
  Record record = record_of(Kind::kNormQuant);
  require(out->view.k == x->width(), "norm_quant: widths differ");
  record.norm_quant = {x->data(), x->stride(), keep_gain(tape, gain, x->width()), eps, &out->view,
                       out->view.f32 != nullptr, out->view.q != nullptr};
  tape.keep(x);
  tape.keep(out);
  tape.add(row_domain(tape, output_rows, std::min<int64_t>(x->rows(), out->view.rows)), record);
}

void add_norm_rows(Tape& tape, const SharedMatrix& x, const Array<const float>& gain, float eps,
                   const SharedMatrix& out, bool add, bool output_rows) {
  Record record = record_of(Kind::kNormRows);
  require(x->width() == out->width(), "norm_rows: widths differ");
  record.norm_rows = {x->data(), x->stride(), keep_gain(tape, gain, x->width()), eps, static_cast<int32_t>(x->width()),
                      out->data(), out->stride(), add};
  tape.keep(x);
  tape.keep(out);
  tape.add(row_domain(tape, output_rows, std::min(x->rows(), out->rows())), record);
}

void add_head_norm_rope(Tape& tape, const SharedMatrix& x, int32_t head_dim, const Gain& gain, float eps,
                        const SharedMatrix& angles) {
  Record record = record_of(Kind::kHeadNormRope);
  const int32_t rotary = static_cast<int32_t>(angles->width());
  require(x->width() % head_dim == 0 && rotary <= head_dim, "head_norm_rope: sizes differ");
  record.rope = {x->data(), x->stride(), static_cast<int32_t>(x->width() / head_dim), head_dim,
                 keep_gain(tape, gain, head_dim), eps, rotary, angles->data()};
  tape.keep(x);
  tape.keep(angles);
  tape.add(row_domain(tape, false, std::min(x->rows(), angles->rows())), record);
}

void add_kv_write(Tape& tape, const SharedMatrix& k, const SharedMatrix& v, const std::shared_ptr<KVCache>& cache,
                  int32_t group, int32_t layer) {
  Record record = record_of(Kind::kKVWrite);
  const int64_t width = static_cast<int64_t>(cache->kv_heads) * cache->head_dim;
  require(k->width() == width && v->width() == width && layer >= 0 && layer < cache->layers, "kv_write: sizes differ");
  record.kv_write.args = {k->data(), v->data(), k->stride(), v->stride(), cache->keys(layer), cache->values(layer),
                          cache->block_bytes(), cache->head_bytes(), cache->format, nullptr, cache->kv_heads,
                          cache->head_dim, cache->block_size};
  record.kv_write.group = group;
  tape.keep(k);
  tape.keep(v);
  tape.keep(cache);
  tape.add(row_domain(tape, false, std::min(k->rows(), v->rows())), record);
}

void add_gate(Tape& tape, const SharedMatrix& gate, const SharedMatrix& up, int32_t epilogue) {
  Record record = record_of(Kind::kGate);
  require(gate->width() == up->width() && gate->stride() == up->stride(), "gate: unlike shapes");
  record.gate = {gate->data(), up->data(), gate->stride(), gate->width(), epilogue};
  tape.keep(gate);
  tape.keep(up);
  tape.add(row_domain(tape, false, std::min(gate->rows(), up->rows())), record);
}

void add_gemm(Tape& tape, const std::shared_ptr<Weight>& w, const SharedActivations& a, const SharedMatrix& out,
              const Gain& bias, int32_t epilogue, bool output_rows, bool joins) {
  Record record = record_of(Kind::kGemm);
  const bool gated = epilogue == kSwiGLU || epilogue == kGeGLU;
  require(w->kernels == tape.kernels(), "gemm: the weight is packed for another instruction set");
  require(w->view.k == a->view.k && out->width() == (gated ? w->view.n / 2 : w->view.n), "gemm: sizes differ");
  require(gated == (w->view.interleave != 0), "gemm: gated epilogues need interleaved weights, and only they");
  require((w->view.group == 0 ? a->view.f32 != nullptr : a->view.q != nullptr), "gemm: activations lack what it reads");
  record.gemm.args = {&w->view, &a->view, out->data(), out->stride(), keep_gain(tape, bias, w->view.n), epilogue};
  record.gemm.output_rows = output_rows;
  row_domain(tape, output_rows, std::min<int64_t>(a->view.rows, out->rows()));
  tape.keep(w);
  tape.keep(a);
  tape.keep(out);
  tape.add(Domain::kPanels, record, joins);
}

struct Masking { float scale, softcap; int32_t window; };

void add_attention(Tape& tape, const SharedMatrix& q, const SharedMatrix& out, const std::shared_ptr<KVCache>& cache,
                   int32_t group, int32_t layer, const Masking& masking) {
  require(layer >= 0 && layer < cache->layers && q->width() == out->width(), "attention: sizes differ");
  require(out->stride() == out->width() && q->width() % cache->head_dim == 0, "attention: sizes differ");
  Record record = record_of(Kind::kAttention);
  AttentionArgs& args = record.attention.args;
  args.q = q->data();
  args.ldq = q->stride();
  args.out = out->data();
  args.k_cache = cache->keys(layer);
  args.v_cache = cache->values(layer);
  args.block_stride = cache->block_bytes();
  args.head_stride = cache->head_bytes();
  args.kv_format = cache->format;
  args.block_size = cache->block_size;
  args.num_heads = static_cast<int32_t>(q->width()) / cache->head_dim;
  args.num_kv_heads = cache->kv_heads;
  args.head_dim = cache->head_dim;
  args.scale = masking.scale;
  args.window = masking.window;
  args.softcap = masking.softcap;
  args.partition = kPartition;
  record.attention.group = group;
  require(args.num_heads % cache->kv_heads == 0, "attention: query heads are not a multiple of KV heads");
  row_domain(tape, false, std::min(q->rows(), out->rows()));
  tape.set_heads(group, {cache->kv_heads, args.num_heads / cache->kv_heads, cache->head_dim, masking.window});
  tape.keep(q);
  tape.keep(out);
  tape.keep(cache);
  tape.add(Domain::kItems, record);
  record.kind = Kind::kMerge;
  tape.add(Domain::kMerges, record);
}

// Row-wise records on one matrix that need nothing else.
void add_plain(Tape& tape, Kind kind, const SharedMatrix& x, float cap, bool output_rows) {
  Record record = record_of(kind);
  record.rows = {x->data(), x->stride(), x->width(), cap, nullptr, 0};
  tape.keep(x);
  const bool vocabulary_wide = kind == Kind::kSoftcap || kind == Kind::kSample;
  require(!vocabulary_wide || x->width() == tape.vocab(), "softcap, sample: not rows of logits");
  tape.add(row_domain(tape, output_rows, x->rows()), record, false, vocabulary_wide);
}

void add_select(Tape& tape, const SharedMatrix& x, const SharedMatrix& out) {
  Record record = record_of(Kind::kSelect);
  require(x->width() == out->width(), "select: widths differ");
  row_domain(tape, false, x->rows());
  record.rows = {x->data(), x->stride(), x->width(), 0.0f, out->data(), out->stride()};
  tape.keep(x);
  tape.keep(out);
  tape.add(row_domain(tape, true, out->rows()), record);
}

}  // namespace

void bind_tape(nb::module_& m) {
  nb::class_<Masking>(m, "Masking", "Scale, softcap (0: none) and window (0: none) of an attention.")
      .def(nb::init<float, float, int32_t>(), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"));

  nb::class_<Tape>(m, "Tape", "A lowered model: records that every worker walks once per step.")
      .def(
          "__init__",
          [](Tape* self, const std::string& isa, std::shared_ptr<Pool> pool, int32_t vocab, int32_t hidden,
             int32_t max_tokens, int32_t max_rows) {
            new (self) Tape(find_kernels(isa), std::move(pool), {vocab, hidden, max_tokens, max_rows});
          },
          nb::arg("isa"), nb::arg("pool"), nb::kw_only(), nb::arg("vocab"), nb::arg("hidden"), nb::arg("max_tokens"),
          nb::arg("max_rows"))
      .def("label", &Tape::label, nb::arg("name"))
      .def("embed", &add_embed, nb::arg("rows").noconvert(), nb::arg("type"), nb::arg("k"), nb::arg("scale"),
           nb::arg("out"))
      .def("angles", &add_angles, nb::arg("inv_freq"), nb::arg("scale"), nb::arg("out"))
      .def("norm_quant", &add_norm_quant, nb::arg("x"), nb::arg("gain").noconvert().none(), nb::arg("eps"),
           nb::arg("out"), nb::arg("output_rows") = false)
      .def("norm_rows", &add_norm_rows, nb::arg("x"), nb::arg("gain").noconvert(), nb::arg("eps"), nb::arg("out"),
           nb::arg("add"), nb::arg("output_rows") = false)
      .def("head_norm_rope", &add_head_norm_rope, nb::arg("x"), nb::arg("head_dim"), nb::arg("gain").noconvert().none(),
           nb::arg("eps"), nb::arg("angles"))
      .def("kv_write", &add_kv_write, nb::arg("k"), nb::arg("v"), nb::arg("cache"), nb::arg("group"), nb::arg("layer"))
      .def("gate", &add_gate, nb::arg("gate"), nb::arg("up"), nb::arg("epilogue"))
      .def("gemm", &add_gemm, nb::arg("w"), nb::arg("a"), nb::arg("out"),
           nb::arg("bias").noconvert().none() = nb::none(), nb::arg("epilogue") = 0, nb::arg("output_rows") = false,
           nb::arg("joins") = false)
      .def("attention", &add_attention, nb::arg("q"), nb::arg("out"), nb::arg("cache"), nb::arg("group"),
           nb::arg("layer"), nb::arg("masking"))
      .def("check_finite", [](Tape& tape, const SharedMatrix& x) { add_plain(tape, Kind::kCheckFinite, x, 0, false); })
      .def("select", &add_select, nb::arg("x"), nb::arg("out"))
      .def("softcap",
           [](Tape& tape, const SharedMatrix& x, float cap) { add_plain(tape, Kind::kSoftcap, x, cap, true); })
      .def("sample", [](Tape& tape, const SharedMatrix& x) { add_plain(tape, Kind::kSample, x, 0, true); })
      .def("run", &run_step, nb::arg("caches"), nb::arg("batch"), nb::arg("previous_rows").noconvert(),
           nb::arg("mask_bits").none(),
           "One step: (ids of all rows [R], -1 where none was chosen; token_ids [N], cu_tokens [S + 1], num_accepted "
           "[S],\n"
           "logprobs [R, 1 + K], top_ids [R, K], signals [R, 4], status [S], nanoseconds per label). Raises ValueError "
           "or\n"
           "TypeError naming the array that is wrong.")
      .def_prop_rw("profiling", &Tape::profiling, &Tape::set_profiling, "Whether each record's time is kept.")
      .def("record_ns", &Tape::record_ns, "Of the last step, per record, summed over the workers; [] when not profiling.")
      .def("phase_ns", [](const Tape& tape) { return tape.phase_ns(); }, "Of the last step, per phase.")
      .def("records", [](const Tape& tape) {
        std::vector<RecordInfo> records;
        for (size_t i = 0; i < tape.num_records(); ++i) records.push_back(tape.describe(static_cast<int32_t>(i)));
        return records;
      })
      .def_prop_ro("labels", &Tape::labels)
      .def_prop_ro("num_records", &Tape::num_records)
      .def_prop_ro("num_phases", [](const Tape& tape) { return static_cast<const Program&>(tape).num_phases(); });
}

}  // namespace headrace
