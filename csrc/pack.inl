// Packing of checkpoint rows into panels, and the embedding lookup: the two readers of raw checkpoint blocks.
//
// A panel is kPanel output columns over all inputs, one linear stream of memory. Quantised panels are a sequence of
// groups, each `quants, scales[32], mins[32]` (mins only with has_min):
//   kW8  [group / 4][32 columns][4 inputs]  one byte a value, unsigned
//   kW4  [group / 4][16 columns][4 inputs]  low nibble: column c, high nibble: column 16 + c
// Float panels have no groups:
//   kF32 [k][32]    kF16 [k][32]    kBF16 [k / 2][32][2]
// One layout serves every instruction set. Values keep the bits of the checkpoint: `w = scale * (q - zero)`, or
// `w = scale * q + min`, with the very scale, so nothing is rounded a second time.
//
// The block formats are those of the GGUF specification. K-quant scales are products of two numbers and are stored as
// f32, the rest keep their f16 bits. This file does not know how GEMM walks the panels.

enum SourceType : int32_t {
  kSrcF32 = 0, kSrcF16 = 1, kSrcQ4_0 = 2, kSrcQ4_1 = 3, kSrcQ5_0 = 6, kSrcQ5_1 = 7, kSrcQ8_0 = 8,
  kSrcQ4_K = 12, kSrcQ5_K = 13, kSrcQ6_K = 14, kSrcBF16 = 30,
};

constexpr int kSuperBlock = 256;            // inputs per K-quant block
constexpr int32_t kMaxInputs = 1 << 17;     // keeps one row's factors within kMaxFactors

struct SourceTraits {
  int32_t format, bits, group, has_min, scale_f32;
  int32_t block_inputs, block_bytes;
};

bool source_traits(int32_t type, SourceTraits* t) {
  switch (type) {
    case kSrcF32: *t = {kF32, 32, 0, 0, 0, 1, 4}; return true;
    case kSrcF16: *t = {kF16, 16, 0, 0, 0, 1, 2}; return true;
    case kSrcBF16: *t = {kBF16, 16, 0, 0, 0, 1, 2}; return true;
    case kSrcQ4_0: *t = {kW4, 4, 32, 0, 0, 32, 18}; return true;
    case kSrcQ4_1: *t = {kW4, 4, 32, 1, 0, 32, 20}; return true;
    case kSrcQ5_0: *t = {kW8, 5, 32, 0, 0, 32, 22}; return true;
    case kSrcQ5_1: *t = {kW8, 5, 32, 1, 0, 32, 24}; return true;
    case kSrcQ8_0: *t = {kW8, 8, 32, 0, 0, 32, 34}; return true;
    case kSrcQ4_K: *t = {kW4, 4, 32, 1, 1, kSuperBlock, 144}; return true;
    case kSrcQ5_K: *t = {kW8, 5, 32, 1, 1, kSuperBlock, 176}; return true;
    case kSrcQ6_K: *t = {kW8, 6, 16, 0, 1, kSuperBlock, 210}; return true;
    default: return false;
  }
}

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t v;
  __builtin_memcpy(&v, p, 2);
  return v;
}

inline uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

inline float bits_to_float(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x0400u) {  // subnormal: an integer times 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
}

inline float bfloat_to_float(uint16_t b) { return bits_to_float(static_cast<uint32_t>(b) << 16); }

// Layout of n columns by k inputs. All formats but F32 need whole blocks; a panel's inputs are never padded.
int64_t packed_layout(int32_t source_type, int32_t n, int32_t k, PackedWeight* w) {
  SourceTraits t;
  if (!source_traits(source_type, &t) || n <= 0 || k <= 0 || k > kMaxInputs || k % t.block_inputs != 0) return -1;
  *w = PackedWeight{};
  w->format = t.format;
  w->n = n;
  w->k = k;
  w->num_panels = (n + kPanel - 1) / kPanel;
  w->group = t.group;
  w->has_min = t.has_min;
  w->scale_f32 = t.scale_f32;
  w->bits = t.bits;
  const int64_t inputs = t.format == kBF16 ? (k + 1) / 2 * 2 : k;
  if (t.group == 0) {
    w->panel_bytes = inputs * kPanel * (t.format == kF32 ? 4 : 2);
  } else {
    const int64_t quants = static_cast<int64_t>(t.group) * kPanel / (t.format == kW4 ? 2 : 1);
    w->panel_bytes = k / t.group * (quants + static_cast<int64_t>(kPanel) * (t.scale_f32 ? 4 : 2) * (1 + t.has_min));
  }
  return w->panel_bytes * w->num_panels;
}

// 32 consecutive inputs of one row: unsigned values, and scale and min of each half (equal unless the group is 16).
struct Decoded {
  uint8_t q[kQuantGroup];
  float scale[2], min;
  uint16_t scale_bits, min_bits;  // the f16 originals, where there are any
};

inline void decode_nibbles(const uint8_t* qs, uint32_t high_bits, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = static_cast<uint8_t>((qs[i] & 15) | (high_bits >> i & 1) << 4);
    q[i + 16] = static_cast<uint8_t>(qs[i] >> 4 | (high_bits >> (i + 16) & 1) << 4);
  }
}

// The 6-bit scale and min of sub-block j, spread over 12 bytes: four of each whole, the upper four split 4 + 2 bits.
inline void k_quant_scale_min(const uint8_t* packed, int j, float* scale, float* min) {
  int s, m;
  if (j < 4) {
    s = packed[j] & 63;
    m = packed[j + 4] & 63;
  } else {
    s = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    m = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
  }
  *scale = static_cast<float>(s);
  *min = static_cast<float>(m);
}

inline void decode_k45(const uint8_t* block, int j, bool five_bits, Decoded* out) {
  k_quant_scale_min(block + 4, j, &out->scale[0], &out->min);
  out->scale[0] *= half_to_float(load_u16(block));
  out->scale[1] = out->scale[0];
  out->min = -(out->min * half_to_float(load_u16(block + 2)));
  const uint8_t* high = block + 16;
  const uint8_t* low = block + (five_bits ? 48 : 16) + 32 * (j / 2);
  const int shift = 4 * (j & 1);
  for (int i = 0; i < 32; ++i) {
    const int fifth = five_bits ? (high[i] >> j & 1) << 4 : 0;
    out->q[i] = static_cast<uint8_t>((low[i] >> shift & 15) | fifth);
  }
}

inline void decode_k6(const uint8_t* block, int j, Decoded* out) {
  const int half = j / 4, quarter = j % 4;
  const uint8_t* low = block + 64 * half + 32 * (quarter & 1);
  const uint8_t* high = block + 128 + 32 * half;
  for (int i = 0; i < 32; ++i) {
    out->q[i] = static_cast<uint8_t>((low[i] >> 4 * (quarter >> 1) & 15) | (high[i] >> 2 * quarter & 3) << 4);
  }
  const float d = half_to_float(load_u16(block + 208));
  for (int i = 0; i < 2; ++i) out->scale[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + 2 * j + i]));
}

// Group `g` of 32 inputs of a quantised row.
inline void decode_group(int32_t type, const uint8_t* row, int64_t g, Decoded* out) {
  SourceTraits t;
  source_traits(type, &t);
  out->min = 0.0f;
  if (t.block_inputs == kSuperBlock) {
    const uint8_t* block = row + g / 8 * t.block_bytes;
    const int j = static_cast<int>(g % 8);
    if (type == kSrcQ6_K) return decode_k6(block, j, out);
    return decode_k45(block, j, type == kSrcQ5_K, out);
  }
  const uint8_t* block = row + g * t.block_bytes;
  out->scale_bits = load_u16(block);
  out->scale[0] = out->scale[1] = half_to_float(out->scale_bits);
  if (t.has_min) {
    out->min_bits = load_u16(block + 2);
    out->min = half_to_float(out->min_bits);
  }
  const uint8_t* body = block + (t.has_min ? 4 : 2);
  if (type == kSrcQ8_0) {
    for (int i = 0; i < 32; ++i) out->q[i] = static_cast<uint8_t>(body[i] ^ 0x80);
  } else if (t.bits == 5) {
    decode_nibbles(body + 4, load_u32(body), out->q);
  } else {
    decode_nibbles(body, 0, out->q);
  }
}

// The raw row behind one lane of a panel, or null for a padding column. With `up`, lanes 0-15 of panel p are gate rows
// 16 p .. 16 p + 15 and lanes 16-31 the same rows of up.
inline const uint8_t* source_row(const SourceRows* src, const SourceRows* up, int panel, int lane) {
  int row = panel * kPanel + lane;
  if (up != nullptr) {
    row = panel * (kPanel / 2) + lane % (kPanel / 2);
    if (lane >= kPanel / 2) src = up;
  }
  return row < src->n ? src->data + row * src->row_bytes : nullptr;
}

inline void store_scale(uint8_t* at, int lane, bool f32, float value, uint16_t bits) {
  if (f32) {
    __builtin_memcpy(at + lane * 4, &value, 4);
  } else {
    __builtin_memcpy(at + lane * 2, &bits, 2);
  }
}

// Writes 32 inputs of one column: one group, or two of 16.
void place_group(const PackedWeight* w, const Decoded& d, int lane, uint8_t* out) {
  const int quads = w->group / 4;
  const int64_t quant_bytes = static_cast<int64_t>(w->group) * kPanel / (w->format == kW4 ? 2 : 1);
  const int64_t scale_bytes = kPanel * (w->scale_f32 ? 4 : 2);
  const int64_t group_bytes = quant_bytes + scale_bytes * (1 + w->has_min);
  for (int half = 0; half < kQuantGroup / w->group; ++half, out += group_bytes) {
    const uint8_t* q = d.q + half * w->group;
    for (int i = 0; i < quads; ++i, q += 4) {
      if (w->format == kW8) {
        __builtin_memcpy(out + (i * kPanel + lane) * 4, q, 4);
        continue;
      }
      uint8_t* quad = out + (i * 16 + lane % 16) * 4;
      for (int j = 0; j < 4; ++j) quad[j] = static_cast<uint8_t>(lane < 16 ? q[j] : quad[j] | q[j] << 4);
    }
    store_scale(out + quant_bytes, lane, w->scale_f32, d.scale[half], d.scale_bits);
    if (w->has_min) store_scale(out + quant_bytes + scale_bytes, lane, w->scale_f32, d.min, d.min_bits);
  }
}

void pack_quantised_panel(const SourceRows* src, const SourceRows* up, const PackedWeight* w, int panel, uint8_t* out) {
  const int64_t bytes = w->panel_bytes / (w->k / kQuantGroup);  // of 32 inputs
  for (int lane = 0; lane < kPanel; ++lane) {
    const uint8_t* row = source_row(src, up, panel, lane);
    Decoded d = {};
    for (int64_t g = 0; g < w->k / kQuantGroup; ++g) {
      if (row != nullptr) decode_group(src->type, row, g, &d);
      place_group(w, d, lane, out + g * bytes);
    }
  }
}

void pack_float_panel(const SourceRows* src, const SourceRows* up, const PackedWeight* w, int panel, uint8_t* out) {
  const int size = w->format == kF32 ? 4 : 2;
  if (w->format == kBF16 && w->k % 2 != 0) __builtin_memset(out, 0, w->panel_bytes);
  for (int lane = 0; lane < kPanel; ++lane) {
    const uint8_t* row = source_row(src, up, panel, lane);
    for (int64_t i = 0; i < w->k; ++i) {
      const int64_t at = w->format == kBF16 ? (i / 2 * kPanel + lane) * 2 + i % 2 : i * kPanel + lane;
      const uint32_t zero = 0;
      const void* value = row != nullptr ? static_cast<const void*>(row + i * size) : &zero;
      if (size == 4) {
        __builtin_memcpy(out + at * 4, value, 4);
      } else {
        __builtin_memcpy(out + at * 2, value, 2);
      }
    }
  }
}

void pack(const SourceRows* src, const SourceRows* up_or_null, PackedWeight* w, int32_t panel_begin, int32_t panel_end) {
  for (int32_t panel = panel_begin; panel < panel_end; ++panel) {
    uint8_t* out = w->data + panel * w->panel_bytes;
    if (w->group == 0) {
      pack_float_panel(src, up_or_null, w, panel, out);
    } else {
      pack_quantised_panel(src, up_or_null, w, panel, out);
    }
  }
}

void embed_quantised_row(const SourceRows* table, const uint8_t* row, float scale, float* out) {
  SourceTraits t;
  source_traits(table->type, &t);
  const int zero = t.has_min ? 0 : 1 << (t.bits - 1);
  Decoded d;
  for (int64_t g = 0; g < table->k / kQuantGroup; ++g, out += kQuantGroup) {
    decode_group(table->type, row, g, &d);
    for (int i = 0; i < kQuantGroup; ++i) {
      const float value = d.scale[i / 16] * static_cast<float>(d.q[i] - zero);
      out[i] = (t.has_min ? value + d.min : value) * scale;
    }
  }
}

// Rows ids[begin, end) of the table, dequantised and scaled, to out rows [begin, end).
void embed(const SourceRows* table, const int32_t* ids, float scale, float* out, int64_t ldo, int32_t begin, int32_t end) {
  for (int32_t r = begin; r < end; ++r) {
    const uint8_t* row = table->data + ids[r] * table->row_bytes;
    float* to = out + r * ldo;
    switch (table->type) {
      case kSrcF32:
        for (int i = 0; i < table->k; ++i) to[i] = bits_to_float(load_u32(row + 4 * i)) * scale;
        break;
      case kSrcF16:
        for (int i = 0; i < table->k; ++i) to[i] = half_to_float(load_u16(row + 2 * i)) * scale;
        break;
      case kSrcBF16:
        for (int i = 0; i < table->k; ++i) to[i] = bfloat_to_float(load_u16(row + 2 * i)) * scale;
        break;
      default: embed_quantised_row(table, row, scale, to);
    }
  }
}
