"""The decoder family: Llama, Mistral, Qwen2, Qwen3, Gemma 3 and SmolLM as one graph builder.

They are one architecture with switches (config.py): norm, attention with rotary positions and grouped heads, norm,
gated MLP. Reading `build_graph` and `_layer` top to bottom is reading the model. The builder knows shapes and names,
not storage: every weight is asked of the checkpoint with the shape that the configuration implies, so a graph that was
built is one whose tensors all exist and fit.
"""

from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import ModelFileError
from headrace.core.kv_group import KVGroup
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.graph import Graph, Op, OpKind, Shard, WeightRef
from headrace.model.rope import inverse_frequencies, rope_scale


def build_graph(config: ModelConfig, checkpoint: Checkpoint) -> Graph:
    """The graph of one model: input_ids [tokens] and output_rows [rows] in, logits [rows, vocab] out.

    Raises ModelFileError when a tensor is missing, has another shape, or is there but has no place in the family.
    """
    groups = kv_groups(config)
    b = _Builder(config, checkpoint)
    table = b.weight("token_embd.weight", config.vocab_size, config.hidden_size)
    x = b.op("embed", "embedding", "hidden", ("input_ids",), weights=(table,), scale=config.embedding_scale)
    for layer in range(config.num_layers):
        x = _layer(b, layer, x, groups)
    x = b.op("select_rows", "selected", "hidden", (x, "output_rows"), rows="rows")
    x = b.norm("output_norm", x, rows="rows")
    head = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    weights = (b.weight(head, config.vocab_size, config.hidden_size),)
    key = None if config.tie_word_embeddings else "output"
    cap = config.final_logit_softcap
    b.op("linear", "logits", "vocab", (x,), weights, shard="vocab", adapter_key=key, rows="rows", softcap=cap)
    b.check_all_used()
    return Graph(tuple(b.ops), b.tensors, b.axes, groups)


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The layers that see everything and those that see a window, each group in layer order."""
    windowed = config.window_pattern or (False,) * config.num_layers
    full = tuple(i for i, w in enumerate(windowed) if not w)
    local = tuple(i for i, w in enumerate(windowed) if w)
    groups = []
    if full:
        groups.append(KVGroup("full", full, config.num_kv_heads, config.head_dim))
    if local:
        groups.append(KVGroup("window", local, config.num_kv_heads, config.head_dim, config.sliding_window))
    return tuple(groups)


def _layer(b: "_Builder", layer: int, x: str, groups: tuple[KVGroup, ...]) -> str:
    config, blk = b.config, f"blk.{layer}"
    h = b.norm(f"{blk}.attn_norm", x)
    h = _attention(b, layer, h, groups)
    if config.sandwich_norms:
        h = b.norm(f"{blk}.post_attention_norm", h)
    x = b.op("add", f"{blk}.attn_residual", "hidden", (x, h))

    h = b.norm(f"{blk}.ffn_norm", x)
    size = (config.intermediate_size, config.hidden_size)
    weights = (b.weight(f"{blk}.ffn_gate.weight", *size), b.weight(f"{blk}.ffn_up.weight", *size))
    h = b.op(
        "gated_mlp", f"{blk}.ffn_gated", "intermediate", (h,), weights,
        shard="column", adapter_key=f"{blk}.ffn_gate_up", activation=config.activation,
    )  # fmt: skip
    h = b.linear(f"{blk}.ffn_down", h, "hidden", "intermediate", shard="row")
    if config.sandwich_norms:
        h = b.norm(f"{blk}.post_ffw_norm", h)
    return b.op("add", f"{blk}.ffn_residual", "hidden", (x, h))


def _attention(b: "_Builder", layer: int, h: str, groups: tuple[KVGroup, ...]) -> str:
    config, blk = b.config, f"blk.{layer}"
    group = next(i for i, g in enumerate(groups) if layer in g.layers)
    local = groups[group].kind == "window"
    q = b.linear(f"{blk}.attn_q", h, "query", "hidden", bias=config.qkv_bias)
    k = b.linear(f"{blk}.attn_k", h, "key_value", "hidden", bias=config.qkv_bias)
    v = b.linear(f"{blk}.attn_v", h, "key_value", "hidden", bias=config.qkv_bias)
    if config.qk_norm:
        q = b.norm(f"{blk}.attn_q_norm", q, axis="query", head_dim=config.head_dim)
        k = b.norm(f"{blk}.attn_k_norm", k, axis="key_value", head_dim=config.head_dim)
    q = b.rope(f"{blk}.q_rope", q, "query", local)
    k = b.rope(f"{blk}.k_rope", k, "key_value", local)
    h = b.op(
        "attention", f"{blk}.attention", "query", (q, k, v),
        kv_group=group,
        layer=groups[group].layers.index(layer),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
        window=groups[group].window,
        softcap=config.attn_logit_softcap,
        mask="causal",
    )  # fmt: skip
    bias = b.checkpoint.has(f"{blk}.attn_output.bias")
    return b.linear(f"{blk}.attn_output", h, "hidden", "query", shard="row", bias=bias)


@dataclass
class _Builder:
    """Collects operations; gives each output its axes and each weight its checked reference."""

    config: ModelConfig
    checkpoint: Checkpoint
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        c = self.config
        self.tensors |= {"input_ids": ("tokens",), "output_rows": ("rows",)}
        self.axes = {
            "hidden": c.hidden_size,
            "query": c.num_heads * c.head_dim,
            "key_value": c.num_kv_heads * c.head_dim,
            "intermediate": c.intermediate_size,
            "vocab": c.vocab_size,
        }
        inv_freq = {local: inverse_frequencies(c, local=local) for local in (False, True)}
        self.rope_attrs: dict[bool, dict[str, Any]] = {
            local: {
                "head_dim": c.head_dim,
                "rotary_dim": c.head_dim,
                "inv_freq": inv_freq[local],
                "scale": rope_scale(c, local=local),
            }
            for local in (False, True)
        }

    def op(
        self,
        kind: OpKind,
        output: str,
        axis: str,
        inputs: tuple[str, ...],
        weights: tuple[WeightRef, ...] = (),
        *,
        bias: WeightRef | None = None,
        shard: Shard | None = None,
        adapter_key: str | None = None,
        rows: str = "tokens",
        **attrs: Any,
    ) -> str:
        self.tensors[output] = (rows, axis)
        self.ops.append(Op(kind, inputs, output, weights, bias, shard, adapter_key, attrs))
        return output

    def weight(self, name: str, *shape: int) -> WeightRef:
        self.used.add(name)
        return self.checkpoint.ref(name, shape)

    def norm(self, name: str, x: str, *, axis: str = "hidden", rows: str = "tokens", head_dim: int = 0) -> str:
        gain = self.weight(f"{name}.weight", head_dim or self.axes[axis])
        eps = self.config.rms_norm_eps
        return self.op("rms_norm", name, axis, (x,), (gain,), rows=rows, eps=eps, head_dim=head_dim)

    def linear(self, name: str, x: str, axis: str, in_axis: str, *, shard: Shard = "column", bias: bool = False) -> str:
        n, k = self.axes[axis], self.axes[in_axis]
        w = self.weight(f"{name}.weight", n, k)
        b = self.weight(f"{name}.bias", n) if bias else None
        return self.op("linear", name, axis, (x,), (w,), bias=b, shard=shard, adapter_key=name, softcap=0.0)

    def rope(self, name: str, x: str, axis: str, local: bool) -> str:
        return self.op("rope", name, axis, (x,), **self.rope_attrs[local])

    def check_all_used(self) -> None:
        """A tensor that nothing reads means that the file is another model than it says."""
        for name in self.checkpoint.names():
            if name not in self.used:
                problem = f"is not a tensor of a {self.config.family} model as configured"
                raise ModelFileError(self.checkpoint.path, name, problem)
