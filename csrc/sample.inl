// One row of logits -> one token, its logprob and alternatives, and the row's quality signals.
//
// The same steps in the same order as headrace/backend/sampling.py: raw statistics; mask; bias; repetition, presence
// and frequency penalty; then at temperature 0 the largest logit (ties: the lowest id), else temperature, min_p, top_k,
// top_p and a draw that walks the kept ids upwards. Sums are double, over blocks of kSamplingBlock columns in index
// order.
//
// Nothing sorts the vocabulary. A filter is a cut in the order (logit descending, id ascending) where the weight passed
// reaches a target: weight 1 and target k for top_k, the probability and its share for top_p. The cut is found by a
// floor that leaves few candidates, then by histograms over the bits of the logit, high bits first.
//
// A row with a NaN or +inf, or of which nothing remains, gets status 1, id 0 and NaN elsewhere.

enum RowFlag : uint8_t { kSampleRow = 1 };

struct RawStatistics {
  bool usable;                  // no NaN, no +inf, and something above -inf
  int32_t argmax;
  float max, second;
  double sum, weighted;         // of e^d and d * e^d, with d = logit - max
};

inline f32v load_columns(const float* x, int64_t i, int64_t end, float fill) {
  return end - i < kLanes ? v_load_first(x + i, end - i, fill) : v_load(x + i);
}

inline int32_t first_equal(const float* x, float value, int32_t begin) {
  while (x[begin] != value) ++begin;
  return begin;
}

// Sums of e^d and d * e^d over a block, with d = logit - max. Eight vectors are added in float, those sums in double.
inline void weigh_block(const float* x, int64_t begin, int64_t end, float max, double* sum, double* weighted) {
  f64sum sums = {}, weighted_sums = {};
  for (int64_t i = begin; i < end;) {
    f32v few = v_zero(), few_weighted = v_zero();
    for (int j = 0; j < 8 && i < end; ++j, i += kLanes) {
      const f32v d = v_max(v_sub(load_columns(x, i, end, -kInfinity), v_set1(max)), v_set1(-200.0f));
      const f32v e = v_exp(d);
      few = v_add(few, e);
      few_weighted = v_fma(e, d, few_weighted);
    }
    v_accumulate(&sums, few);
    v_accumulate(&weighted_sums, few_weighted);
  }
  *sum = v_total(&sums);
  *weighted = v_total(&weighted_sums);
}

RawStatistics raw_statistics(const float* x, int64_t vocab) {
  RawStatistics s = {true, 0, -kInfinity, -kInfinity, 0.0, 0.0};
  const f32v infinity = v_set1(kInfinity);
  f32v first = v_set1(-kInfinity), second = first;
  int64_t best_block = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSamplingBlock) {
    const int64_t end = begin + kSamplingBlock < vocab ? begin + kSamplingBlock : vocab;
    f32v most = v_set1(-kInfinity);
    for (int64_t i = begin; i < end; i += kLanes) {
      const f32v v = load_columns(x, i, end, -kInfinity);
      s.usable &= v_all_less(v, infinity);
      second = v_max(second, v_min(first, v));
      first = v_max(first, v);
      most = v_max(most, v);
    }
    const float block_max = v_hmax(most);
    if (!s.usable) return s;
    if (block_max == -kInfinity) continue;
    double block_sum, block_weighted;
    weigh_block(x, begin, end, block_max, &block_sum, &block_weighted);
    const double gap = static_cast<double>(block_max) - static_cast<double>(s.max);
    const double shift = gap > 0.0 ? -gap : gap;
    const double factor = __builtin_exp(shift);
    if (block_max > s.max) {
      if (s.sum > 0.0) s.weighted = factor * (s.weighted + shift * s.sum);
      s.sum *= factor;
      s.max = block_max;
      best_block = begin;
    } else {
      block_weighted = factor * (block_weighted + shift * block_sum);
      block_sum *= factor;
    }
    s.sum += block_sum;
    s.weighted += block_weighted;
  }
  s.usable = s.max > -kInfinity;
  if (!s.usable) return s;
  s.argmax = first_equal(x, s.max, static_cast<int32_t>(best_block));
  float firsts[kLanes], seconds[kLanes];
  v_store(firsts, first);
  v_store(seconds, second);
  bool top_seen = false;
  for (int i = 0; i < kLanes; ++i) {
    const bool is_top = !top_seen && firsts[i] == s.max;
    top_seen |= is_top;
    const float next = is_top ? seconds[i] : firsts[i];
    s.second = next > s.second ? next : s.second;
  }
  return s;
}

// Ten rounds of Philox4x32 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers, SC11), as a double in [0, 1).
double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t c[4] = {position, choice, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    __builtin_memcpy(c, next, sizeof(c));
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return (static_cast<double>(c[0] >> 5) * 67108864.0 + static_cast<double>(c[1] >> 6)) / 9007199254740992.0;
}

// Sets to -inf the ids whose mask bit is `hidden_bit`.
void hide_ids(const int32_t* bits, uint32_t hidden_bit, int64_t vocab, float* x) {
  for (int64_t begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = static_cast<uint32_t>(bits[begin / 32]) ^ (hidden_bit ? 0xffffffffu : 0u);  // 0: hide
    if (word == 0xffffffffu) continue;
    const int64_t end = begin + 32 < vocab ? begin + 32 : vocab;
    for (int64_t i = begin; i < end; ++i) x[i] = word >> (i - begin) & 1u ? x[i] : -kInfinity;
  }
}

const int32_t* mask_of(const SampleArgs* a, int32_t row) {
  return a->mask_row[row] < 0 ? nullptr : a->mask_bits + a->mask_row[row] * a->mask_words;
}

inline bool is_adjusted(const SampleArgs* a, int32_t row) {
  return a->mask_row[row] >= 0 || a->bias_cu[row + 1] > a->bias_cu[row] || a->penalty_cu[row + 1] > a->penalty_cu[row];
}

// Mask, bias and penalties on a copy of the row.
void adjust_logits(const SampleArgs* a, int32_t row, const float* logits, float* x) {
  __builtin_memcpy(x, logits, sizeof(float) * a->vocab);
  if (mask_of(a, row) != nullptr) hide_ids(mask_of(a, row), 0, a->vocab, x);
  for (int32_t i = a->bias_cu[row]; i < a->bias_cu[row + 1]; ++i) x[a->bias_ids[i]] += a->bias_values[i];
  for (int32_t i = a->penalty_cu[row]; i < a->penalty_cu[row + 1]; ++i) {
    const int32_t count = a->penalty_counts[i];
    float* value = x + a->penalty_ids[i];
    *value = *value > 0.0f ? *value / a->repetition_penalty[row] : *value * a->repetition_penalty[row];
    if (count > 0) *value -= a->presence_penalty[row];
    *value -= a->frequency_penalty[row] * static_cast<float>(count);
  }
}

// The lowest id of the largest value; -1 if there is a NaN or +inf, or nothing above -inf.
int32_t usable_argmax(const float* x, int64_t vocab) {
  const f32v infinity = v_set1(kInfinity);
  float max = -kInfinity;
  int64_t best_block = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSamplingBlock) {
    const int64_t end = begin + kSamplingBlock < vocab ? begin + kSamplingBlock : vocab;
    f32v most = v_set1(-kInfinity);
    bool usable = true;
    for (int64_t i = begin; i < end; i += kLanes) {
      const f32v v = load_columns(x, i, end, -kInfinity);
      usable &= v_all_less(v, infinity);
      most = v_max(most, v);
    }
    if (!usable) return -1;
    if (v_hmax(most) > max) {
      max = v_hmax(most);
      best_block = begin;
    }
  }
  return max > -kInfinity ? first_equal(x, max, static_cast<int32_t>(best_block)) : -1;
}

double block_sum(const float* w, int64_t begin, int64_t end) {
  f64sum sum = {};
  for (int64_t i = begin; i < end; i += kLanes) v_accumulate(&sum, load_columns(w, i, end, 0.0f));
  return v_total(&sum);
}

double total_weight(const float* w, int64_t vocab) {
  double total = 0.0;
  for (int64_t begin = 0; begin < vocab; begin += kSamplingBlock) {
    total += block_sum(w, begin, begin + kSamplingBlock < vocab ? begin + kSamplingBlock : vocab);
  }
  return total;
}

// A row while it is filtered: ids with weight 0 are out.
struct Candidates {
  const float* x;     // logits divided by the temperature
  float* w;           // e^(x - max), or 0
  int64_t vocab;
  float max;
  bool by_count;      // an id counts 1 instead of its weight
};

inline f32v passed_weights(const Candidates& c, int64_t i, f32v floor) {
  f32v w = load_columns(c.w, i, c.vocab, 0.0f);
  if (c.by_count) w = v_zero_unless_less(v_zero(), w, v_set1(1.0f));
  return v_zero_if_less(load_columns(c.x, i, c.vocab, -kInfinity), floor, w);
}

// A floor, as high as a doubling distance from the maximum gives, above which the weight reaches `target`.
float candidate_floor(const Candidates& c, double target) {
  for (float distance = 2.0f; distance < 1024.0f; distance *= 2.0f) {
    const f32v floor = v_set1(c.max - distance);
    f64sum sum = {};
    for (int64_t i = 0; i < c.vocab; i += kLanes) v_accumulate(&sum, passed_weights(c, i, floor));
    if (v_total(&sum) >= target) return c.max - distance;
  }
  return -kInfinity;
}

// Bits of a float in an order that ascends with its value.
inline uint32_t ordered_bits(float x) {
  const uint32_t bits = float_bits(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float from_ordered_bits(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

constexpr int kRadixBits = 11;

// Weight of the ids in [floor, ceiling] whose key starts with `prefix`, by the next bits of the key. Ids outside add
// zero: a branch on each would be guessed wrongly half the time.
void weigh_bins(const Candidates& c, float floor, float ceiling, uint32_t prefix, int shift, int bits, double* bins) {
  __builtin_memset(bins, 0, sizeof(double) << kRadixBits);
  const uint64_t bin_mask = (1u << bits) - 1;
  for (int64_t begin = 0; begin < c.vocab; begin += kLanes) {
    const f32v x = load_columns(c.x, begin, c.vocab, -kInfinity);
    const f32v w = v_zero_if_less(v_set1(ceiling), x, passed_weights(c, begin, v_set1(floor)));
    if (!v_any_less(v_zero(), w)) continue;
    float values[kLanes], weights[kLanes];
    v_store(values, x);
    v_store(weights, w);
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t key = ordered_bits(values[i]);
      bins[key >> shift & bin_mask] += key >> (shift + bits) == prefix ? static_cast<double>(weights[i]) : 0.0;
    }
  }
}

// Puts out every id after the one, in the order (logit descending, id ascending), at which the weight passed reaches
// `target`. At least one id stays; a target that is never reached puts out none.
void cut(const Candidates& c, double target) {
  double bins[1 << kRadixBits];
  float floor = candidate_floor(c, target), ceiling = c.max;
  double passed = 0.0;
  uint32_t prefix = 0;
  for (int shift = 32; shift > 0;) {
    const int bits = shift > kRadixBits ? kRadixBits : shift;
    shift -= bits;
    weigh_bins(c, floor, ceiling, prefix, shift, bits, bins);
    int bin = (1 << bits) - 1;
    while (bin >= 0 && !(bins[bin] > 0.0 && passed + bins[bin] >= target)) passed += bins[bin--];
    if (bin < 0) return;
    prefix = prefix << bits | static_cast<uint32_t>(bin);
    const float lowest = from_ordered_bits(prefix << shift);
    const float highest = from_ordered_bits(prefix << shift | ((1u << shift) - 1));
    floor = lowest > floor ? lowest : floor;
    ceiling = highest < ceiling ? highest : ceiling;
  }
  const float last = from_ordered_bits(prefix);
  int64_t i = 0;
  for (bool reached = false; !reached && i < c.vocab; ++i) {  // rounding may leave it unreached: then all of them stay
    if (c.x[i] != last || !(c.w[i] > 0.0f)) continue;
    passed += c.by_count ? 1.0 : static_cast<double>(c.w[i]);
    reached = passed >= target;
  }
  for (int64_t j = 0; j < c.vocab; ++j) c.w[j] = c.x[j] < last ? 0.0f : c.w[j];
  for (int64_t j = i; j < c.vocab; ++j) c.w[j] = c.x[j] == last ? 0.0f : c.w[j];
}

// The first id whose cumulative weight exceeds u * total. Rounding may put that beyond the end: then the last kept id.
int32_t draw(const float* w, int64_t vocab, double u) {
  const double target = u * total_weight(w, vocab);
  double before = 0.0;
  int32_t last = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSamplingBlock) {
    const int64_t end = begin + kSamplingBlock < vocab ? begin + kSamplingBlock : vocab;
    const double sum = block_sum(w, begin, end);
    const bool here = before + sum > target;
    double within = 0.0;
    for (int64_t i = begin; i < end && (here || end == vocab); ++i) {
      if (!(w[i] > 0.0f)) continue;
      last = static_cast<int32_t>(i);
      within += static_cast<double>(w[i]);
      if (before + within > target) return last;
    }
    if (here) return last;
    before += sum;
  }
  return last;
}

// Temperature, filters and draw on adjusted logits whose largest is `max`. x and w may overlap neither each other nor
// hold less than vocab floats; x may be the logits themselves.
int32_t choose(const SampleArgs* a, int32_t row, const float* logits, float max, float* x, float* w) {
  const int64_t vocab = a->vocab;
  const f32v temperature = v_set1(a->temperature[row]);
  const float top = max / a->temperature[row];
  const float floor = a->min_p[row] > 0.0f ? top + __builtin_logf(a->min_p[row]) : -kInfinity;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    // Adding zero makes -0 a +0, so that equal logits have equal bits.
    const f32v scaled = v_add(v_div(load_columns(logits, i, vocab, -kInfinity), temperature), v_zero());
    const f32v weight = v_zero_if_less(scaled, v_set1(floor), v_exp(v_sub(scaled, v_set1(top))));
    if (vocab - i < kLanes) {
      v_store_first(x + i, scaled, vocab - i);
      v_store_first(w + i, weight, vocab - i);
    } else {
      v_store(x + i, scaled);
      v_store(w + i, weight);
    }
  }
  if (a->top_k[row] > 0 && a->top_k[row] < vocab) cut({x, w, vocab, top, true}, a->top_k[row]);
  if (a->top_p[row] < 1.0f) cut({x, w, vocab, top, false}, a->top_p[row] * total_weight(w, vocab));
  return draw(w, vocab, uniform(a->seed[row], a->choice[row], a->position[row]));
}

// The k largest logits in the order (logit descending, id ascending), by insertion into the sorted list so far.
void most_likely(const float* x, int64_t vocab, int32_t k, float* values, int32_t* ids) {
  int32_t count = 0;
  for (int64_t begin = 0; begin < vocab; begin += kLanes) {
    if (count == k && !v_any_less(v_set1(values[k - 1]), load_columns(x, begin, vocab, -kInfinity))) continue;
    const int64_t end = begin + kLanes < vocab ? begin + kLanes : vocab;
    for (int64_t i = begin; i < end; ++i) {
      if (count == k && !(x[i] > values[k - 1])) continue;
      int32_t at = count < k ? count++ : k - 1;
      for (; at > 0 && values[at - 1] < x[i]; --at) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
      }
      values[at] = x[i];
      ids[at] = static_cast<int32_t>(i);
    }
  }
}

void write_logprobs(const SampleArgs* a, int32_t row, const float* logits, double log_sum, int32_t token) {
  float* out = a->out_logprobs + row * (1 + static_cast<int64_t>(a->max_logprobs));
  int32_t* ids = a->out_top_ids + row * static_cast<int64_t>(a->max_logprobs);
  if (token >= 0) out[0] = static_cast<float>(logits[token] - log_sum);
  int32_t k = a->num_logprobs[row];
  k = k > a->max_logprobs ? a->max_logprobs : k > a->vocab ? a->vocab : k;
  if (k <= 0) return;
  most_likely(logits, a->vocab, k, out + 1, ids);
  for (int32_t i = 1; i <= k; ++i) out[i] = static_cast<float>(out[i] - log_sum);
}

// Logprob of the token, entropy in nats, margin of the largest logit, and the mass that the mask removed.
void write_signals(const SampleArgs* a, int32_t row, const float* logits, const RawStatistics& s, int32_t token,
                   float* scratch) {
  float* out = a->out_signals + row * 4;
  const double log_sum = s.max + __builtin_log(s.sum);
  if (token >= 0) out[0] = static_cast<float>(logits[token] - log_sum);
  out[1] = static_cast<float>(__builtin_log(s.sum) - s.weighted / s.sum);
  out[2] = a->vocab > 1 ? s.max - s.second : kInfinity;
  out[3] = 0.0f;
  if (mask_of(a, row) == nullptr) return;
  __builtin_memcpy(scratch, logits, sizeof(float) * a->vocab);
  hide_ids(mask_of(a, row), 1, a->vocab, scratch);
  for (int64_t i = 0; i < a->vocab; i += kLanes) {
    const f32v e = v_exp(v_sub(load_columns(scratch, i, a->vocab, -kInfinity), v_set1(s.max)));
    if (a->vocab - i < kLanes) v_store_first(scratch + i, e, a->vocab - i);
    else v_store(scratch + i, e);
  }
  out[3] = static_cast<float>(total_weight(scratch, a->vocab) / s.sum);
}

void clear_row(const SampleArgs* a, int32_t row, int32_t id, uint8_t status) {
  const float nan = __builtin_nanf("");
  a->out_ids[row] = id;
  a->out_status[row] = status;
  for (int i = 0; i < 4; ++i) a->out_signals[row * 4 + i] = nan;
  const int64_t k = a->max_logprobs;
  for (int64_t i = 0; i <= k; ++i) a->out_logprobs[row * (1 + k) + i] = nan;
  for (int64_t i = 0; i < k; ++i) a->out_top_ids[row * k + i] = -1;
}

void sample(const SampleArgs* a, int32_t row) {
  const float* logits = a->logits + row * a->ld;
  float* x = a->scratch + row * a->scratch_stride;
  float* w = x + a->vocab;
  const RawStatistics s = raw_statistics(logits, a->vocab);
  if (!s.usable) return clear_row(a, row, 0, 1);
  int32_t token = a->target_ids[row], chosen = -1;
  if (a->flags[row] & kSampleRow) {
    const float* adjusted = logits;
    chosen = s.argmax;
    if (is_adjusted(a, row)) {
      adjust_logits(a, row, logits, x);
      adjusted = x;
      chosen = usable_argmax(x, a->vocab);
      if (chosen < 0) return clear_row(a, row, 0, 1);
    }
    const float max = adjusted[chosen], temperature = a->temperature[row];
    // A temperature so small that the quotient overflows is the limit 0.
    if (temperature > 0.0f && __builtin_isfinite(max / temperature)) chosen = choose(a, row, adjusted, max, x, w);
    token = chosen;
  }
  clear_row(a, row, chosen, 0);
  if (a->num_logprobs[row] >= 0) write_logprobs(a, row, logits, s.max + __builtin_log(s.sum), token);
  write_signals(a, row, logits, s, token, w);
}
