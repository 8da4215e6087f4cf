// The Python module headrace._C. Shapes and dtypes are checked here, at the border, and nowhere below.
#include "bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"

namespace headrace {
namespace {

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_kernels()) names.push_back(table->name);
  return names;
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
}

}  // namespace
}  // namespace headrace

NB_MODULE(_C, m) {
  using namespace headrace;
  m.doc() = "Native kernels of the CPU backend (docs/kernels.md).";
  m.def("instruction_sets", &instruction_sets, "Names of the kernel tables this machine can run, best first.");
  bind_tensors(m);
  bind_eager(m);
}
