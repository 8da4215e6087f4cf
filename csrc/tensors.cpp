#include "tensors.h"

#include <stdexcept>

namespace headrace {

Matrix::Matrix(int64_t rows, int64_t width)
    : memory_(std::make_shared<Memory>(sizeof(float) * rows * width)),
      data_(memory_->as<float>()), rows_(rows), width_(width), stride_(width) {}

Matrix Matrix::columns(int64_t begin, int64_t count) const {
  Matrix part = *this;
  part.data_ += begin;
  part.width_ = count;
  return part;
}

ActivationBuffer::ActivationBuffer(int64_t rows, int64_t k, bool want_f32, bool want_q) : view() {
  const int64_t k_pad = (k + kQuantGroup - 1) / kQuantGroup * kQuantGroup;
  view.rows = static_cast<int32_t>(rows);
  view.k = static_cast<int32_t>(k);
  view.k_pad = static_cast<int32_t>(k_pad);
  if (want_f32) {
    f32_ = Memory(sizeof(float) * rows * k_pad);
    view.f32 = f32_.as<float>();
  }
  if (want_q) {
    q_ = Memory(rows * k_pad);
    scale_ = Memory(sizeof(float) * rows * k_pad / kQuantGroup);
    sum_ = Memory(sizeof(int16_t) * rows * k_pad / 16);
    view.q = q_.as<int8_t>();
    view.scale = scale_.as<float>();
    view.sum = sum_.as<int16_t>();
  }
}

Weight::Weight(const KernelTable* kernels, const PackedWeight& layout, int64_t bytes, Arena& arena)
    : kernels(kernels), view(layout), piece_(arena.take(bytes)), bytes_(bytes) {
  view.data = piece_.data;
}

int64_t kv_head_bytes(KVFormat format, int32_t head_dim, int32_t block_size) {
  const int64_t values = static_cast<int64_t>(head_dim) * block_size;
  return format == kKVInt8 ? values + sizeof(float) * block_size : 2 * values;
}

KVFormat kv_format(const std::string& name) {
  if (name == "bf16") return kKVBF16;
  if (name == "int8") return kKVInt8;
  throw std::invalid_argument("KV caches are bf16 or int8, not " + name);
}

KVCache::KVCache(int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads, int32_t head_dim,
                 KVFormat format)
    : layers(layers), blocks(blocks), block_size(block_size), kv_heads(kv_heads), head_dim(head_dim), format(format),
      memory_(static_cast<size_t>(blocks) * block_bytes()) {}

}  // namespace headrace
