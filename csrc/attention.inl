// Attention over the paged KV cache: softmax(q k / sqrt(d)) v, partition by partition.
//
// A row is one query head of one query token. The rows that share a KV head are computed together, so each block of K
// and V is read once for all of them. A partition is 256 positions (kPartition), several blocks of the cache:
//
//   positions   0 ........ 255 | 256 ....... 511 | 512 ...            partitions, each from a fresh (max, sum, acc)
//               [blk][blk]...  | [blk][blk]...   |
//
// A partition takes three passes: the scores of all its tokens, their softmax row by row, and the weighted sum of V.
// The largest score is known before the first weight: nothing is ever rescaled, and acc stays in registers.
//
// Both products are C[rows][n] = A[rows][k] B[k][n]: scores = q K with n = tokens of a block, k = head_dim, and
// acc = p V with n = head_dim, k = tokens of the partition. Every element of C is one chain in ascending k, or a sum of
// whole numbers, so how rows are grouped cannot change a bit. A token that a row does not see has weight zero.
//
// Scores are in units of log2, so that a weight is 2^(score - max): scale and log2(e) are folded into q, or, with a
// softcap, log2(e) into the cap.
//
// What the passes do is the cache's: BF16Cache (attention_bf16.inl) or Int8Cache (attention_int8.inl).

// One partition from a fresh state. Rows that see nothing of it end with sum 0.
template <class Cache>
void attend_partition(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, int64_t partition) {
  Span span = {partition * a->partition, partition * a->partition, (partition + 1) * a->partition};
  if (span.begin < chunk->begin) span.begin = chunk->begin;
  if (span.end > chunk->end) span.end = chunk->end;
  if (span.begin >= span.end) {
    for (int r = 0; r < chunk->rows; ++r) chunk->sum[r] = 0.0f;
    return;
  }
  Cache::score_span(a, item, chunk, span);
  const int size = a->block_size;
  const int begin = static_cast<int>(span.begin - span.first) / size * size;
  const int end = static_cast<int>(span.end - span.first + size - 1) / size * size;
  for (int r = 0; r < chunk->rows; ++r) {
    const int64_t lo = chunk->visible_begin[r] - span.first, hi = chunk->visible_end[r] - span.first;
    const int from = static_cast<int>(lo < begin ? begin : lo), to = static_cast<int>(hi > end ? end : hi);
    Cache::weigh_row(a, chunk, r, from, to, begin, end);
  }
  Cache::sum_values(a, item, chunk, span);
}

// (max, sum, acc) += (part_max, part_sum, part): the one way in which partitions are combined, in ascending order.
inline void merge_partition(const float* part, float part_max, float part_sum, int head_dim, float* acc, float* max,
                            float* sum) {
  if (part_sum == 0.0f) return;
  if (*sum == 0.0f) {
    __builtin_memcpy(acc, part, sizeof(float) * head_dim);
    *max = part_max;
    *sum = part_sum;
    return;
  }
  const float top = part_max > *max ? part_max : *max;
  const f32v keep = v_exp2(v_set1(*max - top)), add = v_exp2(v_set1(part_max - top));
  for (int d = 0; d < head_dim; d += kLanes) {
    v_store(acc + d, v_fma(v_load(part + d), add, v_mul(v_load(acc + d), keep)));
  }
  *sum = part_sum * v_first(add) + *sum * v_first(keep);
  *max = top;
}

inline void write_row(const float* acc, float sum, int head_dim, float* out) {
  const f32v inverse = v_set1(1.0f / sum);
  for (int d = 0; d < head_dim; d += kLanes) v_store(out + d, v_mul(v_load(acc + d), inverse));
}

inline void write_partial(const AttentionArgs* a, const Chunk* chunk, int r, int64_t partial) {
  const int64_t index = partial * a->partial_rows + chunk->first_row + r;
  a->partial_max[index] = chunk->max[r];
  a->partial_sum[index] = chunk->sum[r];
  __builtin_memcpy(a->partial_acc + index * a->head_dim, chunk->acc + r * a->head_dim, sizeof(float) * a->head_dim);
}

template <class Cache>
void attend(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk) {
  const int rows = (item->q_end - item->q_begin) * group_size(a);
  const int dim = a->head_dim;
  for (int first = 0; first < rows; first += kChunkRows) {
    begin_chunk(a, item, first, rows - first < kChunkRows ? rows - first : kChunkRows, Cache::kTile, chunk);
    for (int r = 0; r < chunk->rows; ++r) {
      Cache::pack_query(a, a->q + row_offset(a, item, first + r, a->ldq), r, chunk);
    }
    for (int64_t partition = item->part_begin; partition < item->part_end; ++partition) {
      attend_partition<Cache>(a, item, chunk, partition);
      for (int r = 0; r < chunk->rows; ++r) {
        if (item->partial >= 0) {
          write_partial(a, chunk, r, item->partial + partition - item->part_begin);
        } else {
          merge_partition(chunk->acc + r * dim, chunk->max[r], chunk->sum[r], dim,
                          chunk->total + r * dim, &chunk->total_max[r], &chunk->total_sum[r]);
        }
      }
    }
    for (int r = 0; r < chunk->rows && item->partial < 0; ++r) {
      write_row(chunk->total + r * dim, chunk->total_sum[r], dim, out_row(a, item, first + r));
    }
  }
}

void attention(const AttentionArgs* a, const AttentionItem* item, void* scratch) {
  Chunk* chunk = static_cast<Chunk*>(scratch);
  if (a->kv_format == kKVInt8) return attend<Int8Cache>(a, item, chunk);
  attend<BF16Cache>(a, item, chunk);
}

void attention_merge(const AttentionArgs* a, const AttentionItem* items, int32_t count) {
  const int rows = (items[0].q_end - items[0].q_begin) * group_size(a);
  for (int row = 0; row < rows; ++row) {
    float acc[kMaxHeadDim], max = -kInfinity, sum = 0.0f;
    for (int32_t i = 0; i < count; ++i) {
      for (int64_t part = 0; part < items[i].part_end - items[i].part_begin; ++part) {
        const int64_t index = (items[i].partial + part) * a->partial_rows + row;
        merge_partition(a->partial_acc + index * a->head_dim, a->partial_max[index], a->partial_sum[index], a->head_dim,
                        acc, &max, &sum);
      }
    }
    write_row(acc, sum, a->head_dim, out_row(a, &items[0], row));
  }
}
