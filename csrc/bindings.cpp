// The Python module headrace._C. Shapes and dtypes are checked here, at the border, and nowhere below.
#include "bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "dispatch.h"

namespace headrace {
namespace {

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_kernels()) names.push_back(table->name);
  return names;
}

void check_block(const KVCache& cache, int32_t block) {
  require(block >= 0 && block < cache.blocks, "block outside the KV cache");
}

nb::bytes read_blocks(const KVCache& cache, const Array<const int32_t>& ids) {
  std::vector<uint8_t> out(ids.size() * cache.block_bytes());
  for (size_t i = 0; i < ids.size(); ++i) {
    check_block(cache, ids.data()[i]);
    std::memcpy(out.data() + i * cache.block_bytes(), cache.block(ids.data()[i]), cache.block_bytes());
  }
  return nb::bytes(out.data(), out.size());
}

void write_blocks(KVCache& cache, const Array<const int32_t>& ids, const nb::bytes& data) {
  require(static_cast<int64_t>(data.size()) == static_cast<int64_t>(ids.size()) * cache.block_bytes(),
          "data: not one block for each id");
  for (size_t i = 0; i < ids.size(); ++i) {
    check_block(cache, ids.data()[i]);
    std::memcpy(cache.block(ids.data()[i]), static_cast<const uint8_t*>(data.data()) + i * cache.block_bytes(),
                cache.block_bytes());
  }
}

void bind_tensors(nb::module_& m) {
  nb::class_<Weight>(m, "Weight", "A matrix packed for one instruction set.")
      .def_prop_ro("n", [](const Weight& w) { return w.view.n; })
      .def_prop_ro("k", [](const Weight& w) { return w.view.k; })
      .def_prop_ro("format", [](const Weight& w) { return w.view.format; })
      .def_prop_ro("bits", [](const Weight& w) { return w.view.bits; })
      .def_prop_ro("group", [](const Weight& w) { return w.view.group; })
      .def_prop_ro("has_min", [](const Weight& w) { return w.view.has_min != 0; })
      .def_prop_ro("scale_f32", [](const Weight& w) { return w.view.scale_f32 != 0; })
      .def_prop_ro("interleave", [](const Weight& w) { return w.view.interleave != 0; })
      .def_prop_ro("num_panels", [](const Weight& w) { return w.view.num_panels; })
      .def_prop_ro("panel_bytes", [](const Weight& w) { return w.view.panel_bytes; })
      .def_prop_ro("nbytes", [](const Weight& w) { return w.bytes(); })
      .def_prop_ro("data", [](nb::handle self) {
        const Weight& w = nb::cast<const Weight&>(self);
        const size_t shape[1] = {static_cast<size_t>(w.bytes())};
        return nb::cast(nb::ndarray<nb::numpy, uint8_t>(w.view.data, 1, shape, self));
      });

  nb::class_<Matrix>(m, "Matrix", "Float rows, or some columns of them.")
      .def(nb::init<int64_t, int64_t>(), nb::arg("rows"), nb::arg("width"))
      .def("columns", [](const Matrix& x, int64_t begin, int64_t count) {
        require(begin >= 0 && count > 0 && begin + count <= x.width(), "columns: outside the matrix");
        return x.columns(begin, count);
      }, nb::arg("begin"), nb::arg("count"))
      .def_prop_ro("array", [](nb::handle self) {
        const Matrix& x = nb::cast<const Matrix&>(self);
        const size_t shape[2] = {static_cast<size_t>(x.rows()), static_cast<size_t>(x.width())};
        const int64_t strides[2] = {x.stride(), 1};
        return nb::cast(nb::ndarray<nb::numpy, float>(x.data(), 2, shape, self, strides));
      });

  nb::class_<KVCache>(m, "KVCache", "Keys and values of one KV group's layers, bf16 or int8, in blocks.")
      .def("__init__", [](KVCache* self, int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads,
                          int32_t head_dim, const std::string& dtype) {
        new (self) KVCache(layers, blocks, block_size, kv_heads, head_dim, kv_format(dtype));
      }, nb::arg("layers"), nb::arg("blocks"), nb::arg("block_size"), nb::arg("kv_heads"), nb::arg("head_dim"),
         nb::arg("dtype") = "bf16")
      .def_prop_ro("nbytes", &KVCache::bytes)
      .def_prop_ro("block_bytes", &KVCache::block_bytes)
      .def("copy", [](KVCache& cache, int32_t source, int32_t destination) {
        check_block(cache, source);
        check_block(cache, destination);
        std::memcpy(cache.block(destination), cache.block(source), cache.block_bytes());
      }, nb::arg("source"), nb::arg("destination"))
      .def("read", &read_blocks, nb::arg("ids").noconvert())
      .def("write", &write_blocks, nb::arg("ids").noconvert(), nb::arg("data"));
}

}  // namespace
}  // namespace headrace

NB_MODULE(_C, m) {
  using namespace headrace;
  m.doc() = "Native kernels of the CPU backend (docs/kernels.md).";
  m.def("instruction_sets", &instruction_sets, "Names of the kernel tables this machine can run, best first.");
  bind_tensors(m);
  bind_eager(m);
  bind_weights(m);
  bind_profile(m);
  bind_tape(m);
}
