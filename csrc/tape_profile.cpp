// What the records of a tape are and how long they took: the native half of `headrace profile`.
#include "tape.h"

namespace headrace {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kEmbed: return "embed";
    case Kind::kAngles: return "angles";
    case Kind::kNormQuant: return "norm_quant";
    case Kind::kNormRows: return "norm_rows";
    case Kind::kHeadNormRope: return "head_norm_rope";
    case Kind::kKVWrite: return "kv_write";
    case Kind::kGate: return "gate";
    case Kind::kCheckFinite: return "check_finite";
    case Kind::kSelect: return "select";
    case Kind::kSoftcap: return "softcap";
    case Kind::kSample: return "sample";
    case Kind::kGemm: return "gemm";
    case Kind::kAttention: return "attention";
    case Kind::kMerge: return "merge";
  }
  return "unknown";
}

std::string stored_as(const PackedWeight& w) {
  switch (w.format) {
    case kF32: return "f32";
    case kF16: return "f16";
    case kBF16: return "bf16";
    default: return "w" + std::to_string(w.bits) + "g" + std::to_string(w.group);
  }
}

// Width, and bytes read and written, of a row of a record that has no weights to speak of.
void describe_row(const Record& record, RecordInfo* out) {
  int64_t width = 0, bytes = 4;  // bytes per value of the row
  switch (record.kind) {
    case Kind::kEmbed: width = record.embed.table.k; break;
    case Kind::kAngles: width = 2 * record.angles.half; break;
    case Kind::kNormQuant:
      width = record.norm_quant.a->k;
      bytes = 4 + (record.norm_quant.want_f32 ? 4 : 0) + (record.norm_quant.want_q ? 1 : 0);
      break;
    case Kind::kNormRows:
      width = record.norm_rows.k;
      bytes = 8;
      break;
    case Kind::kHeadNormRope:
      width = static_cast<int64_t>(record.rope.heads) * record.rope.head_dim;
      bytes = 8;
      break;
    case Kind::kKVWrite:
      width = static_cast<int64_t>(record.kv_write.args.num_kv_heads) * record.kv_write.args.head_dim * 2;
      bytes = 6;
      break;
    case Kind::kGate:
      width = record.gate.width;
      bytes = 12;
      break;
    default:
      width = record.rows.width;
      bytes = record.kind == Kind::kSelect || record.kind == Kind::kSoftcap ? 8 : 4;
  }
  out->n = out->k = static_cast<int32_t>(width);
  out->row_bytes = width * bytes;
}

}  // namespace

std::vector<int64_t> Tape::record_ns() const {
  std::vector<int64_t> sums(busy_ns_.empty() ? 0 : records_.size());
  for (const std::vector<int64_t>& busy : busy_ns_) {
    for (size_t i = 0; i < busy.size(); ++i) sums[i] += busy[i];
  }
  return sums;
}

RecordInfo Tape::describe(int32_t index) const {
  const Record& record = records_.at(index);
  int32_t phase = 0;
  while (phases_[phase].end <= index) ++phase;
  RecordInfo out = {name_of(record.kind), labels_[phases_[phase].label], phase,
                    phases_[phase].domain == Domain::kOutputRows, -1, 0, 0, 0, 0, 0, ""};
  if (record.kind == Kind::kGemm) {
    const PackedWeight& w = *record.gemm.args.w;
    out.output_rows = record.gemm.output_rows;
    out.n = w.n;
    out.k = w.k;
    out.weight_bytes = w.num_panels * w.panel_bytes;
    out.row_bytes = static_cast<int64_t>(w.k) * (w.group != 0 ? 1 : 4) + static_cast<int64_t>(w.n) * 4;
    out.row_ops = 2 * static_cast<int64_t>(w.n) * w.k;
    out.weight = stored_as(w);
  } else if (record.kind == Kind::kAttention || record.kind == Kind::kMerge) {
    const AttentionArgs& args = record.attention.args;
    out.group = record.attention.group;
    out.n = out.k = args.num_heads * args.head_dim;
    out.row_bytes = static_cast<int64_t>(out.n) * 8;
    out.row_ops = record.kind == Kind::kAttention ? 4 * static_cast<int64_t>(out.n) : 0;
  } else {
    describe_row(record, &out);
  }
  return out;
}

}  // namespace headrace
