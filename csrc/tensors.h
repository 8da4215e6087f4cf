// The owners of native memory that Python builds a tape from: packed weights, activations, matrices, KV caches.
// Each knows its own sizes, so that the border can check what it is given. None knows a model.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace headrace {

// A float matrix, or some columns of one.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t width);
  Matrix columns(int64_t begin, int64_t count) const;  // shares the memory

  float* data() const { return data_; }
  int64_t rows() const { return rows_; }
  int64_t width() const { return width_; }
  int64_t stride() const { return stride_; }

 private:
  std::shared_ptr<Memory> memory_;
  float* data_;
  int64_t rows_, width_, stride_;
};

// What norm_quant writes and gemm reads.
class ActivationBuffer {
 public:
  ActivationBuffer(int64_t rows, int64_t k, bool want_f32, bool want_q);
  Activations view;

 private:
  Memory f32_, q_, scale_, sum_;
};

class Weight {
 public:
  Weight(const KernelTable* kernels, const PackedWeight& layout, int64_t bytes, Arena& arena);
  const KernelTable* kernels;  // whose layout it has
  PackedWeight view;
  int64_t bytes() const { return bytes_; }

 private:
  Piece piece_;
  int64_t bytes_;
};

// Bytes of the K, or V, of one KV head in a block.
int64_t kv_head_bytes(KVFormat format, int32_t head_dim, int32_t block_size);

// "bf16" or "int8". Raises ValueError for another name.
KVFormat kv_format(const std::string& name);

// Keys and values of the layers of one KV group, block by block: what a sequence touches first lies together, so memory
// is taken as contexts grow, and one block is one copy. A block holds, layer by layer, the K of all heads, then their V,
// in the form of `format` (KVFormat).
class KVCache {
 public:
  KVCache(int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads, int32_t head_dim, KVFormat format);

  // Of block 0; block b begins b * block_bytes() further.
  uint8_t* keys(int32_t layer) const { return memory_.data() + 2 * layer * part_bytes(); }
  uint8_t* values(int32_t layer) const { return keys(layer) + part_bytes(); }
  int64_t head_bytes() const { return kv_head_bytes(format, head_dim, block_size); }
  int64_t block_bytes() const { return 2 * layers * part_bytes(); }  // of all layers, keys and values
  uint8_t* block(int32_t index) const { return memory_.data() + index * block_bytes(); }
  int64_t bytes() const { return static_cast<int64_t>(memory_.size()); }

  const int32_t layers, blocks, block_size, kv_heads, head_dim;
  const KVFormat format;

 private:
  int64_t part_bytes() const { return kv_heads * head_bytes(); }
  Memory memory_;
};

}  // namespace headrace
