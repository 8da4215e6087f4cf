// Weights from Python: room for them, packing, and reading what was packed before (headrace/backend/weights.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "pool.h"
#include "sections.h"

namespace headrace {
namespace {

struct PackProgram : Program {
  int32_t num_phases() const override { return 1; }
  int32_t num_chunks(int32_t) const override { return weight->num_panels; }
  void run_chunk(int32_t, int32_t panel, int) override {
    kernels->pack(&source, up.data != nullptr ? &up : nullptr, weight, panel, panel + 1);
  }
  const KernelTable* kernels;
  SourceRows source, up;
  PackedWeight* weight;
};

void pack_weight(Pool& pool, Weight& weight, const Array<const uint8_t>& rows, int32_t type,
                 const std::optional<Array<const uint8_t>>& up) {
  PackProgram program;
  program.kernels = weight.kernels;
  program.weight = &weight.view;
  program.source = source_rows(rows, type, weight.view.k);
  program.up = up ? source_rows(*up, type, weight.view.k) : SourceRows{};
  PackedWeight layout;
  weight.kernels->packed_layout(type, weight.view.n, weight.view.k, &layout);
  require(layout.panel_bytes == weight.view.panel_bytes, "rows: of another format than the weight");
  require(up.has_value() == (weight.view.interleave != 0), "up: missing, or not wanted");
  require(weight.view.n == program.source.n * (up ? 2 : 1), "rows: not as many as the weight has");
  if (up) require(up->shape(0) == rows.shape(0) && up->shape(1) == rows.shape(1), "up: unlike gate");
  nb::gil_scoped_release released;
  pool.run(program);
}

using Bytes = Array<uint8_t>;

std::vector<bool> read_sections(Pool& pool, int fd, const std::vector<Bytes>& targets,
                                const std::vector<int64_t>& offsets, const std::vector<std::vector<uint64_t>>& sums) {
  require(offsets.size() == targets.size() && sums.size() == targets.size(), "read_sections: lists of unequal length");
  std::vector<Section> sections;
  for (size_t i = 0; i < targets.size(); ++i) {
    sections.push_back({targets[i].data(), static_cast<int64_t>(targets[i].size()), offsets[i], sums[i]});
  }
  ReadProgram program(fd, std::move(sections));
  {
    nb::gil_scoped_release released;
    pool.run(program);
  }
  std::vector<bool> sound(targets.size());
  for (size_t i = 0; i < sound.size(); ++i) sound[i] = program.is_sound(i);
  return sound;
}

std::vector<uint64_t> checksums(const Array<const uint8_t>& data) {
  std::vector<uint64_t> sums;
  nb::gil_scoped_release released;
  const size_t bytes = data.size();
  for (size_t at = 0; at < bytes; at += kCheckedBytes) {
    sums.push_back(checksum(data.data() + at, std::min<size_t>(kCheckedBytes, bytes - at)));
  }
  return sums;
}

}  // namespace

std::shared_ptr<Weight> new_weight(const KernelTable* kernels, Arena& arena, int32_t type, int32_t n, int32_t k,
                                   bool interleave) {
  PackedWeight layout;
  const int64_t bytes = kernels->packed_layout(type, interleave ? 2 * n : n, k, &layout);
  require(bytes >= 0, "rows: no packed layout for this format and width");
  layout.interleave = interleave;
  if (interleave) layout.num_panels = (n + kPanel / 2 - 1) / (kPanel / 2);  // half a panel of each per panel
  return std::make_shared<Weight>(kernels, layout, layout.panel_bytes * layout.num_panels, arena);
}

void bind_weights(nb::module_& m) {
  m.attr("PACK_VERSION") = kPackVersion;
  nb::class_<Pool>(m, "Pool", "Worker threads; the caller is worker 0.")
      .def(nb::init<int, bool>(), nb::arg("threads"), nb::arg("spin"))
      .def_prop_ro("threads", &Pool::threads);
  nb::class_<Arena>(m, "Arena", "Where weights lie one after another, in huge pages.").def(nb::init<>());
  m.def("new_weight", [](const std::string& isa, Arena& arena, int32_t type, int32_t n, int32_t k, bool interleave) {
    return new_weight(find_kernels(isa), arena, type, n, k, interleave);
  }, nb::arg("isa"), nb::arg("arena"), nb::arg("type"), nb::arg("n"), nb::arg("k"), nb::arg("interleave") = false,
     "Room for n rows of k inputs (n gate and n up rows, with interleave); `pack` or `read_sections` fills it.");
  m.def("pack", &pack_weight, nb::arg("pool"), nb::arg("weight"), nb::arg("rows").noconvert(), nb::arg("type"),
        nb::arg("up").noconvert().none() = nb::none(), "Packs rows as stored into `weight`, over all workers.");
  m.def("packed_bytes", [](int32_t type, int32_t n, int32_t k) {
    PackedWeight layout;
    return find_kernels("auto")->packed_layout(type, n, k, &layout);
  }, nb::arg("type"), nb::arg("n"), nb::arg("k"), "Bytes of a packed matrix of n rows and k inputs; -1: not possible.");
  m.def("read_sections", &read_sections, nb::arg("pool"), nb::arg("fd"), nb::arg("targets").noconvert(),
        nb::arg("offsets"), nb::arg("sums"),
        "Fills each array from the file at its offset, over all workers. False where the checksums do not fit.");
  m.def("checksums", &checksums, nb::arg("data").noconvert(), "Checksum of each MiB, as `read_sections` wants them.");
}

}  // namespace headrace
