// The owners of native memory that Python builds a tape from: packed weights, activations, matrices, KV caches.
// Each knows its own sizes, so that the border can check what it is given. None knows a model.
#pragma once
#include <memory>
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

// Keys and values of the layers of one KV group, bf16, block by block: what a sequence touches first lies together, so
// memory is taken as contexts grow, and one block is one copy. Per layer of a block:
//   keys [kv_head][head_dim / 2][block_size][2]    values [kv_head][block_size / 2][head_dim][2]
class KVCache {
 public:
  KVCache(int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads, int32_t head_dim);

  // Of block 0; block b begins b * block_elements() further.
  uint16_t* keys(int32_t layer) const { return memory_.as<uint16_t>() + 2 * layer * part_elements(); }
  uint16_t* values(int32_t layer) const { return keys(layer) + part_elements(); }
  int64_t block_elements() const { return 2 * layers * part_elements(); }
  int64_t block_bytes() const { return block_elements() * 2; }  // of all layers, keys and values
  uint8_t* block(int32_t index) const { return memory_.data() + index * block_bytes(); }
  int64_t bytes() const { return static_cast<int64_t>(memory_.size()); }

  const int32_t layers, blocks, block_size, kv_heads, head_dim;

 private:
  int64_t part_elements() const { return static_cast<int64_t>(kv_heads) * head_dim * block_size; }
  Memory memory_;
};

}  // namespace headrace
