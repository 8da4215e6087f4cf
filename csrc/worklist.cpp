#include "worklist.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr int32_t kTileRows = 24;       // query tokens times heads of an item: what attention keeps in the L1 cache
constexpr int32_t kItemsPerThread = 4;  // fewer than this and a straggler costs too much

}  // namespace

void WorkList::build(const HeadShape& heads, int32_t num_seqs, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                     int threads) {
  whole_.clear();
  int64_t total_parts = 0;
  const int32_t tile = std::max(1, kTileRows / heads.queries_per_head);
  for (int32_t seq = 0; seq < num_seqs; ++seq) {
    const int32_t begin = cu_seqlens_q[seq], end = cu_seqlens_q[seq + 1];
    const int32_t first_position = seq_lens[seq] - end;  // plus a token's index: its position
    for (int32_t head = 0; head < heads.num_kv_heads; ++head) {
      // Late tiles see most: first they go, so that the last items to be taken are short.
      for (int32_t q = begin + (end - begin - 1) / tile * tile; q >= begin; q -= tile) {
        const int32_t q_end = std::min(q + tile, end);
        const int32_t last = first_position + q_end - 1, oldest = first_position + q - heads.window + 1;
        const int32_t part_begin = heads.window > 0 && oldest > 0 ? oldest / kPartition : 0;
        whole_.push_back({seq, head, q, q_end, part_begin, last / kPartition + 1, -1});
        total_parts += whole_.back().part_end - part_begin;
      }
    }
  }
  const int64_t wanted = static_cast<int64_t>(threads) * kItemsPerThread;
  const bool few = threads > 1 && static_cast<int64_t>(whole_.size()) < wanted;
  split(few ? static_cast<int32_t>(std::max<int64_t>(1, total_parts / wanted)) : INT32_MAX, heads.queries_per_head);
}

void WorkList::split(int32_t parts_per_item, int32_t queries_per_head) {
  items.clear();
  merges.clear();
  num_partials = 0;
  partial_rows = 0;
  for (const AttentionItem& whole : whole_) {  // those that are cut come first: merges are runs of items
    if (whole.part_end - whole.part_begin <= parts_per_item) continue;
    merges.push_back(static_cast<int32_t>(items.size()));
    for (int32_t part = whole.part_begin; part < whole.part_end; part += parts_per_item) {
      AttentionItem item = whole;
      item.part_begin = part;
      item.part_end = std::min(part + parts_per_item, whole.part_end);
      item.partial = num_partials;
      num_partials += item.part_end - item.part_begin;
      items.push_back(item);
    }
    partial_rows =
        std::max<int64_t>(partial_rows, static_cast<int64_t>(whole.q_end - whole.q_begin) * queries_per_head);
  }
  if (!merges.empty()) merges.push_back(static_cast<int32_t>(items.size()));
  for (const AttentionItem& whole : whole_) {
    if (whole.part_end - whole.part_begin <= parts_per_item) items.push_back(whole);
  }
}

}  // namespace headrace
