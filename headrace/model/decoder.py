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
from headrace.model.graph import Graph, Op, Shard, WeightRef
from headrace.model.rope import inverse_frequencies, rope_scale


def build_graph(config: ModelConfig, checkpoint: Checkpoint) -> Graph:
    """The graph of one model: input_ids [tokens] and output_rows [rows] in, logits [rows, vocab] out.

    Raises ModelFileError when a tensor is missing, has another shape, or is there but has no place in the family.
    """
    groups = kv_groups(config)
    b = _Builder(config, checkpoint)
    size = (config.vocab_size, config.hidden_size)
    table = b.weight("token_embd.weight", *size)
    embed = Op("embed", ("input_ids",), "embedding", (table,), attrs={"scale": config.embedding_scale})
    x = b.add(embed, "hidden")
    for layer in range(config.num_layers):
        x = _layer(b, layer, x, groups)
    x = b.add(Op("select_rows", (x, "output_rows"), "selected"), "hidden", "rows")
    x = b.norm("output_norm", x)
    head = table if config.tie_word_embeddings else b.weight("output.weight", *size)
    key = None if config.tie_word_embeddings else "output"
    attrs = {"softcap": config.final_logit_softcap}
    b.add(Op("linear", (x,), "logits", (head,), shard="vocab", adapter_key=key, attrs=attrs), "vocab", "rows")
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
    x = b.add(Op("add", (x, h), f"{blk}.attn_residual"), "hidden")

    h = b.norm(f"{blk}.ffn_norm", x)
    size = (config.intermediate_size, config.hidden_size)
    weights = (b.weight(f"{blk}.ffn_gate.weight", *size), b.weight(f"{blk}.ffn_up.weight", *size))
    attrs = {"activation": config.activation}
    mlp = Op("gated_mlp", (h,), f"{blk}.ffn_gated", weights, None, "column", f"{blk}.ffn_gate_up", attrs)
    h = b.linear(f"{blk}.ffn_down", b.add(mlp, "intermediate"), "hidden", shard="row")
    if config.sandwich_norms:
        h = b.norm(f"{blk}.post_ffw_norm", h)
    return b.add(Op("add", (x, h), f"{blk}.ffn_residual"), "hidden")


def _attention(b: "_Builder", layer: int, h: str, groups: tuple[KVGroup, ...]) -> str:
    config, blk = b.config, f"blk.{layer}"
    group = next(i for i, g in enumerate(groups) if layer in g.layers)
    local = groups[group].kind == "window"
    q = b.linear(f"{blk}.attn_q", h, "query", bias=config.qkv_bias)
    k = b.linear(f"{blk}.attn_k", h, "key_value", bias=config.qkv_bias)
    v = b.linear(f"{blk}.attn_v", h, "key_value", bias=config.qkv_bias)
    if config.qk_norm:
        q = b.norm(f"{blk}.attn_q_norm", q, head_dim=config.head_dim)
        k = b.norm(f"{blk}.attn_k_norm", k, head_dim=config.head_dim)
    q = b.rope(f"{blk}.q_rope", q, local)
    k = b.rope(f"{blk}.k_rope", k, local)
    attrs = {
        "kv_group": group,
        "layer": groups[group].layers.index(layer),
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "scale": config.attention_scale or config.head_dim**-0.5,
        "window": groups[group].window,
        "softcap": config.attn_logit_softcap,
        "mask": "causal",
    }
    h = b.add(Op("attention", (q, k, v), f"{blk}.attention", attrs=attrs), "query")
    bias = b.checkpoint.has(f"{blk}.attn_output.bias")
    return b.linear(f"{blk}.attn_output", h, "hidden", shard="row", bias=bias)


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

    def add(self, op: Op, axis: str, rows: str = "tokens") -> str:
        """Append an operation whose output is [rows, axis]; returns the output's name."""
        self.tensors[op.output] = (rows, axis)
        self.ops.append(op)
        return op.output

    def weight(self, name: str, *shape: int) -> WeightRef:
        self.used.add(name)
        return self.checkpoint.ref(name, shape)

    def norm(self, name: str, x: str, *, head_dim: int = 0) -> str:
        rows, axis = self.tensors[x]
        gain = self.weight(f"{name}.weight", head_dim or self.axes[axis])
        attrs = {"eps": self.config.rms_norm_eps, "head_dim": head_dim}
        return self.add(Op("rms_norm", (x,), name, (gain,), attrs=attrs), axis, rows)

    def linear(self, name: str, x: str, axis: str, *, shard: Shard = "column", bias: bool = False) -> str:
        n, k = self.axes[axis], self.axes[self.tensors[x][-1]]
        w = self.weight(f"{name}.weight", n, k)
        b = self.weight(f"{name}.bias", n) if bias else None
        return self.add(Op("linear", (x,), name, (w,), b, shard, name, {"softcap": 0.0}), axis)

    def rope(self, name: str, x: str, local: bool) -> str:
        return self.add(Op("rope", (x,), name, attrs=self.rope_attrs[local]), self.tensors[x][-1])

    def check_all_used(self) -> None:
        """A tensor that nothing reads means that the file is another model than it says."""
        for name in self.checkpoint.names():
            if name not in self.used:
                problem = f"is not a tensor of a {self.config.family} model as configured"
                raise ModelFileError(self.checkpoint.path, name, problem)
