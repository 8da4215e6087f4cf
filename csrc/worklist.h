// The attention work of one step and one KV group: built once, used by every layer of the group.
//
// An item is a tile of query tokens of one sequence against one KV head. Only when there are too few items for the
// threads are they cut, and only between partitions: which partitions exist depends on positions alone, so neither the
// number of threads nor the neighbours in a batch can move a bit.
#pragma once
#include <vector>

#include "kernels.h"

namespace headrace {

struct HeadShape {
  int32_t num_kv_heads, queries_per_head;  // query heads that share a KV head
  int32_t head_dim;
  int32_t window;                          // 0: none
};

struct WorkList {
  std::vector<AttentionItem> items;
  std::vector<int32_t> merges;  // item indices [merges[i], merges[i + 1]) are one group whose partials are merged
  int32_t num_partials = 0;
  int64_t partial_rows = 0;

  int32_t num_merges() const { return merges.empty() ? 0 : static_cast<int32_t>(merges.size()) - 1; }
  void build(const HeadShape& heads, int32_t num_seqs, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
             int threads);

 private:
  void split(int32_t parts_per_item, int32_t queries_per_head);
  std::vector<AttentionItem> whole_;
};

}  // namespace headrace
