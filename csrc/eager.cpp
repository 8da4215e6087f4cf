// Kernels(isa): each kernel by itself, on NumPy arrays. For tests and measurements; serving goes through the tape.
#include <nanobind/stl/string.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>

#include "bindings.h"
#include "dispatch.h"
#include "sampling_args.h"
#include "tensors.h"

namespace headrace {
namespace {

typedef std::array<int32_t, 2> Range;  // [begin, end); end -1: to the last

int32_t range_end(const Range& range, int64_t count) {
  const int32_t end = range[1] < 0 ? static_cast<int32_t>(count) : range[1];
  require(range[0] >= 0 && range[0] <= end && end <= count, "range: outside the matrix");
  return end;
}

template <typename T>
const T* or_null(const std::optional<Array<const T>>& array, int64_t count, const char* what) {
  if (!array) return nullptr;
  require(array->ndim() == 1 && static_cast<int64_t>(array->shape(0)) == count, std::string(what) + ": wrong length");
  return array->data();
}

template <typename T>
void check_caches(const Array<T>& k_cache, const Array<T>& v_cache, KVFormat format, int32_t head_dim,
                  int32_t block_size) {
  require(k_cache.ndim() == 3 && v_cache.ndim() == 3, "k_cache, v_cache: not three axes");
  require(head_dim > 0 && head_dim <= 256 && head_dim % 16 == 0, "head_dim: no multiple of 16 up to 256");
  require(block_size == 16 || block_size == 32, "block_size: neither 16 nor 32");
  require(static_cast<int64_t>(k_cache.shape(2)) == kv_head_bytes(format, head_dim, block_size),
          "k_cache: not the bytes of a head in a block");
  require(v_cache.size() == k_cache.size(), "v_cache: unlike k_cache");
}

int64_t rows_of(const Array<float>& m, const char* what) {
  require(m.ndim() == 2, std::string(what) + ": not a matrix");
  return static_cast<int64_t>(m.shape(0));
}

}  // namespace

const KernelTable* find_kernels(const std::string& isa) {
  for (const KernelTable* table : available_kernels()) {
    if (isa == "auto" || isa == table->name) return table;
  }
  throw nb::value_error(("this machine cannot run the instruction set " + isa).c_str());
}

SourceRows source_rows(const Array<const uint8_t>& rows, int32_t type, int32_t k) {
  require(rows.ndim() == 2, "rows: not a matrix of bytes");
  return {rows.data(), static_cast<int64_t>(rows.shape(1)), type, static_cast<int32_t>(rows.shape(0)), k};
}

namespace {

class Kernels {
 public:
  explicit Kernels(const std::string& isa) : table_(find_kernels(isa)) {}

  const KernelTable* table() const { return table_; }
  std::string name() const { return table_->name; }

  std::shared_ptr<Weight> pack(const Array<const uint8_t>& rows, int32_t type, int32_t k,
                               const std::optional<Array<const uint8_t>>& up) const {
    const SourceRows source = source_rows(rows, type, k);
    SourceRows second = {};
    if (up) second = source_rows(*up, type, k);
    if (up) require(second.n == source.n && second.row_bytes == source.row_bytes, "up: unlike gate");
    Arena arena;
    std::shared_ptr<Weight> weight = new_weight(table_, arena, type, source.n, k, up.has_value());
    table_->pack(&source, up ? &second : nullptr, &weight->view, 0, weight->view.num_panels);
    return weight;
  }

  std::shared_ptr<ActivationBuffer> norm_quant(const Array<const float>& x,
                                               const std::optional<Array<const float>>& gain, float eps, bool want_f32,
                                               bool want_q, std::shared_ptr<ActivationBuffer> out) const {
    require(x.ndim() == 2, "x: not a matrix");
    const int64_t rows = x.shape(0), k = x.shape(1);
    if (!out) out = std::make_shared<ActivationBuffer>(rows, k, want_f32, want_q);
    require(out->view.rows >= rows && out->view.k == k, "out: wrong shape");
    require((!want_f32 || out->view.f32 != nullptr) && (!want_q || out->view.q != nullptr), "out: lacks what is asked");
    const NormArgs args = {x.data(), k, or_null(gain, k, "gain"), eps, &out->view, want_f32, want_q};
    table_->norm_quant(&args, 0, static_cast<int32_t>(rows));
    return out;
  }

  void gemm(const Weight& w, const ActivationBuffer& a, const Array<float>& out,
            const std::optional<Array<const float>>& bias, int32_t epilogue, Range panels, Range rows) const {
    const bool gated = epilogue == kSwiGLU || epilogue == kGeGLU;
    const int64_t width = gated ? w.view.n / 2 : w.view.n;
    require(w.kernels == table_, "w: packed for another instruction set");
    require(w.view.k == a.view.k, "a: has another width than w");
    require((w.view.group == 0 ? a.view.f32 != nullptr : a.view.q != nullptr), "a: lacks what this format reads");
    require(gated == (w.view.interleave != 0), "epilogue: gated ones need interleaved weights, and only they");
    require(rows_of(out, "out") == a.view.rows && static_cast<int64_t>(out.shape(1)) >= width, "out: wrong shape");
    const GemmArgs args = {
        &w.view, &a.view, out.data(), static_cast<int64_t>(out.shape(1)), or_null(bias, w.view.n, "bias"), epilogue};
    table_->gemm(&args, panels[0], range_end(panels, w.view.num_panels), rows[0], range_end(rows, a.view.rows));
  }

  void norm_rows(const Array<const float>& x, const Array<const float>& gain, float eps, const Array<float>& out,
                 bool add) const {
    const int64_t rows = rows_of(out, "out"), k = out.shape(1);
    require(x.ndim() == 2 && static_cast<int64_t>(x.shape(0)) == rows && static_cast<int64_t>(x.shape(1)) == k,
            "x: shape");
    require(gain.size() == static_cast<size_t>(k), "gain: wrong length");
    table_->norm_rows(x.data(), k, gain.data(), eps, static_cast<int32_t>(k), out.data(), k, 0,
                      static_cast<int32_t>(rows), add);
  }

  void head_norm_rope(const Array<float>& x, int32_t heads, int32_t head_dim,
                      const std::optional<Array<const float>>& gain, float eps, int32_t rotary_dim,
                      const Array<const float>& cos_sin) const {
    const int64_t rows = rows_of(x, "x");
    require(static_cast<int64_t>(x.shape(1)) >= static_cast<int64_t>(heads) * head_dim, "x: narrower than its heads");
    require(static_cast<int64_t>(cos_sin.size()) == rows * rotary_dim && rotary_dim <= head_dim, "cos_sin: wrong size");
    table_->head_norm_rope(x.data(), x.shape(1), heads, head_dim, or_null(gain, head_dim, "gain"), eps, rotary_dim,
                           cos_sin.data(), 0, static_cast<int32_t>(rows));
  }

  // Caches: bytes [blocks][kv_heads][bytes of a head's K, or V] of `dtype`, as csrc/kernels.h lays them out.
  void kv_write(const Array<const float>& k, const Array<const float>& v, const Array<uint8_t>& k_cache,
                const Array<uint8_t>& v_cache, const Array<const int32_t>& slots, int32_t head_dim, int32_t block_size,
                const std::string& dtype) const {
    const KVFormat format = kv_format(dtype);
    check_caches(k_cache, v_cache, format, head_dim, block_size);
    const int64_t blocks = k_cache.shape(0), heads = k_cache.shape(1), head_bytes = k_cache.shape(2);
    const int64_t tokens = slots.size(), ld = heads * head_dim;
    require(static_cast<int64_t>(k.size()) == tokens * ld && v.size() == k.size(), "k, v: wrong shape");
    for (int64_t t = 0; t < tokens; ++t) {
      require(slots.data()[t] >= 0 && slots.data()[t] < blocks * block_size, "slots: outside the cache");
    }
    const KVWriteArgs args = {k.data(), v.data(), ld, ld, k_cache.data(), v_cache.data(), heads * head_bytes,
                              head_bytes, format, slots.data(), static_cast<int32_t>(heads), head_dim, block_size};
    table_->kv_write(&args, 0, static_cast<int32_t>(tokens));
  }

  // items: [n][7], the fields of AttentionItem. Items with a partial are merged with their neighbours of the same
  // sequence, head and queries.
  void attention(const Array<const float>& q, const Array<float>& out, const Array<const uint8_t>& k_cache,
                 const Array<const uint8_t>& v_cache, const Array<const int32_t>& block_table,
                 const Array<const int32_t>& cu_seqlens_q, const Array<const int32_t>& seq_lens, int32_t head_dim,
                 int32_t block_size, const std::string& dtype, float scale, int32_t window, float softcap,
                 const Array<const int32_t>& items, int32_t partition) const {
    AttentionArgs a = {};
    a.kv_format = kv_format(dtype);
    check_caches(k_cache, v_cache, static_cast<KVFormat>(a.kv_format), head_dim, block_size);
    require(q.ndim() == 2 && out.ndim() == 2 && items.ndim() == 2 && items.shape(1) == 7 && block_table.ndim() == 2,
            "q, out, items, block_table: wrong axes");
    require(partition > 0 && partition <= kPartition, "partition: more positions than the kernels hold");
    a.head_dim = head_dim;
    a.num_kv_heads = static_cast<int32_t>(k_cache.shape(1));
    a.block_size = block_size;
    a.num_heads = static_cast<int32_t>(out.shape(1)) / a.head_dim;
    a.q = q.data();
    a.ldq = q.shape(1);
    a.out = out.data();
    a.k_cache = k_cache.data();
    a.v_cache = v_cache.data();
    a.head_stride = k_cache.shape(2);
    a.block_stride = a.num_kv_heads * a.head_stride;
    a.block_table = block_table.data();
    a.max_blocks = static_cast<int32_t>(block_table.shape(1));
    a.cu_seqlens_q = cu_seqlens_q.data();
    a.seq_lens = seq_lens.data();
    a.scale = scale;
    a.window = window;
    a.softcap = softcap;
    a.partition = partition;
    run_items(&a, reinterpret_cast<const AttentionItem*>(items.data()), static_cast<int32_t>(items.shape(0)));
  }

  nb::object embed(const Array<const uint8_t>& rows, int32_t type, int32_t k, const Array<const int32_t>& ids,
                   float scale) const {
    const SourceRows table = source_rows(rows, type, k);
    PackedWeight layout;
    require(table_->packed_layout(type, table.n, k, &layout) >= 0, "rows: no such format, or a wrong width for it");
    for (size_t i = 0; i < ids.size(); ++i) {
      require(ids.data()[i] >= 0 && ids.data()[i] < table.n, "ids: outside the table");
    }
    float* out;
    nb::object result = new_array<float>({ids.size(), static_cast<size_t>(k)}, &out);
    table_->embed(&table, ids.data(), scale, out, k, 0, static_cast<int32_t>(ids.size()));
    return result;
  }

  void softcap(const Array<float>& x, float cap) const { table_->softcap(x.data(), x.size(), cap); }

  void gate(const Array<const float>& gate, const Array<const float>& up, const Array<float>& out,
            int32_t epilogue) const {
    require(gate.size() == out.size() && up.size() == out.size(), "gate, up, out: unlike shapes");
    table_->gate(gate.data(), up.data(), out.data(), out.size(), epilogue);
  }

  // (token_ids [R], logprobs [R, 1 + K], top_ids [R, K], signals [R, 4], status [R]) of a Batch's rows.
  nb::tuple sample(const Array<const float>& logits, nb::handle batch, int32_t max_logprobs) const {
    require(logits.ndim() == 2, "logits: not a matrix");
    const size_t rows = logits.shape(0), vocab = logits.shape(1), k = max_logprobs;
    SampleOutputs out = {};
    out.max_logprobs = max_logprobs;
    nb::object ids = new_array<int32_t>({rows}, &out.ids), logprobs = new_array<float>({rows, 1 + k}, &out.logprobs);
    nb::object top_ids = new_array<int32_t>({rows, k}, &out.top_ids),
               signals = new_array<float>({rows, 4}, &out.signals);
    nb::object status = new_array<uint8_t>({rows}, &out.status);
    SampleArgs args = sample_args(batch, nb::none(), rows, vocab, out);
    args.logits = logits.data();
    args.scratch = scratch(sizeof(float) * 2 * vocab)->as<float>();
    for (size_t row = 0; row < rows; ++row) table_->sample(&args, static_cast<int32_t>(row));
    return nb::make_tuple(ids, logprobs, top_ids, signals, status);
  }

 private:
  void run_items(AttentionArgs* a, const AttentionItem* items, int32_t count) const {
    int64_t partials = 0;
    for (int32_t i = 0; i < count; ++i) {
      const AttentionItem& item = items[i];
      const int64_t rows = static_cast<int64_t>(item.q_end - item.q_begin) * (a->num_heads / a->num_kv_heads);
      if (item.partial >= 0) partials = std::max<int64_t>(partials, item.partial + item.part_end - item.part_begin);
      if (rows > a->partial_rows) a->partial_rows = rows;
    }
    Memory acc(sizeof(float) * partials * a->partial_rows * a->head_dim),
        max(sizeof(float) * partials * a->partial_rows);
    Memory sum(sizeof(float) * partials * a->partial_rows);
    void* const space = scratch(1 << 20)->data();
    a->partial_acc = acc.as<float>();
    a->partial_max = max.as<float>();
    a->partial_sum = sum.as<float>();
    for (int32_t i = 0; i < count; ++i) table_->attention(a, items + i, space);
    for (int32_t begin = 0, end; begin < count; begin = end) {
      end = begin + 1;
      if (items[begin].partial < 0) continue;
      while (end < count && std::memcmp(&items[begin], &items[end], offsetof(AttentionItem, part_begin)) == 0) ++end;
      table_->attention_merge(a, items + begin, end - begin);
    }
  }

  // Kept between calls: fresh pages would cost a measurement more than some kernels do. Calls hold the GIL.
  const Memory* scratch(size_t bytes) const {
    if (scratch_.size() < bytes) scratch_ = Memory(bytes);
    return &scratch_;
  }

  const KernelTable* table_;
  mutable Memory scratch_;
};

template <typename T>
nb::object activation_array(nb::handle self, T* data, int64_t rows, int64_t width) {
  if (data == nullptr) return nb::none();
  const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(width)};
  return nb::cast(nb::ndarray<nb::numpy, T>(data, 2, shape, self));
}

nb::object property(nb::handle self, const char* what) {
  const Activations& a = nb::cast<const ActivationBuffer&>(self).view;
  switch (what[0]) {
    case 'f': return activation_array(self, a.f32, a.rows, a.k_pad);
    case 'q': return activation_array(self, a.q, a.rows, a.k_pad);
    case 'm': return activation_array(self, a.sum, a.rows, a.k_pad / 16);
    default: return activation_array(self, a.scale, a.rows, a.k_pad / kQuantGroup);
  }
}

}  // namespace

void bind_eager(nb::module_& m) {
  nb::class_<ActivationBuffer>(m, "Activations", "Rows as a GEMM reads them: f32, or int8 with scales and sums.")
      .def(nb::init<int64_t, int64_t, bool, bool>(), nb::arg("rows"), nb::arg("k"), nb::arg("want_f32"),
           nb::arg("want_q"))
      .def_prop_ro("f32", [](nb::handle self) { return property(self, "f32"); })
      .def_prop_ro("q", [](nb::handle self) { return property(self, "q"); })
      .def_prop_ro("scale", [](nb::handle self) { return property(self, "scale"); })
      .def_prop_ro("sum", [](nb::handle self) { return property(self, "m"); });

  nb::class_<Kernels>(m, "Kernels", "The kernels of one instruction set, each by itself on NumPy arrays.")
      .def(nb::init<const std::string&>(), nb::arg("isa") = "auto")
      .def_prop_ro("name", &Kernels::name)
      .def_static("kv_head_bytes", [](const std::string& dtype, int32_t head_dim, int32_t block_size) {
        return kv_head_bytes(kv_format(dtype), head_dim, block_size);
      }, nb::arg("dtype"), nb::arg("head_dim"), nb::arg("block_size"), "Bytes of a KV head's K, or V, in a block.")
      .def("pack", &Kernels::pack, nb::arg("rows").noconvert(), nb::arg("type"), nb::arg("k"),
           nb::arg("up").noconvert().none() = nb::none())
      .def("norm_quant", &Kernels::norm_quant, nb::arg("x").noconvert(),
           nb::arg("gain").noconvert().none() = nb::none(), nb::arg("eps") = 1e-5f, nb::arg("want_f32") = true,
           nb::arg("want_q") = true, nb::arg("out").none() = nb::none())
      .def("gemm", &Kernels::gemm, nb::arg("w"), nb::arg("a"), nb::arg("out").noconvert(),
           nb::arg("bias").noconvert().none() = nb::none(), nb::arg("epilogue") = 0, nb::arg("panels") = Range{0, -1},
           nb::arg("rows") = Range{0, -1})
      .def("norm_rows", &Kernels::norm_rows, nb::arg("x").noconvert(), nb::arg("gain").noconvert(), nb::arg("eps"),
           nb::arg("out").noconvert(), nb::arg("add") = false)
      .def("head_norm_rope", &Kernels::head_norm_rope, nb::arg("x").noconvert(), nb::arg("heads"), nb::arg("head_dim"),
           nb::arg("gain").noconvert().none(), nb::arg("eps"), nb::arg("rotary_dim"), nb::arg("cos_sin").noconvert())
      .def("kv_write", &Kernels::kv_write, nb::arg("k").noconvert(), nb::arg("v").noconvert(),
           nb::arg("k_cache").noconvert(), nb::arg("v_cache").noconvert(), nb::arg("slots").noconvert(),
           nb::arg("head_dim"), nb::arg("block_size"), nb::arg("dtype") = "bf16")
      .def("attention", &Kernels::attention, nb::arg("q").noconvert(), nb::arg("out").noconvert(),
           nb::arg("k_cache").noconvert(), nb::arg("v_cache").noconvert(), nb::arg("block_table").noconvert(),
           nb::arg("cu_seqlens_q").noconvert(), nb::arg("seq_lens").noconvert(), nb::arg("head_dim"),
           nb::arg("block_size"), nb::arg("dtype"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
           nb::arg("items").noconvert(), nb::arg("partition") = kPartition)
      .def("embed", &Kernels::embed, nb::arg("rows").noconvert(), nb::arg("type"), nb::arg("k"),
           nb::arg("ids").noconvert(), nb::arg("scale") = 1.0f)
      .def("softcap", &Kernels::softcap, nb::arg("x").noconvert(), nb::arg("cap"))
      .def("gate", &Kernels::gate, nb::arg("gate").noconvert(), nb::arg("up").noconvert(), nb::arg("out").noconvert(),
           nb::arg("epilogue"))
      .def("sample", &Kernels::sample, nb::arg("logits").noconvert(), nb::arg("batch"), nb::arg("max_logprobs"));
}

}  // namespace headrace
