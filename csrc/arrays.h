// NumPy arrays at the border: typed, C-contiguous, checked; nothing is converted or copied on the way in.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

namespace headrace {

namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const std::string& message) {
  if (!condition) throw nb::value_error(message.c_str());
}

// An attribute that must be an array of T with `ndim` axes. It stays valid while `object` holds it.
template <typename T>
Array<const T> array_of(nb::handle object, const char* name, size_t ndim) {
  Array<const T> array;
  if (!nb::try_cast(object.attr(name), array, false) || array.ndim() != ndim) {
    throw nb::type_error(
        (std::string(name) + ": not a C-contiguous array of the dtype and axes that Batch declares").c_str());
  }
  return array;
}

template <typename T>
nb::object new_array(std::initializer_list<size_t> shape, T** data) {
  size_t count = 1;
  for (size_t axis : shape) count *= axis;
  T* memory = new T[count > 0 ? count : 1]();
  nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  *data = memory;
  return nb::cast(nb::ndarray<nb::numpy, T>(memory, shape.size(), shape.begin(), owner));
}

}  // namespace headrace
