"""The graph of each family: its operations in order, its KV groups, its switches."""

from collections import Counter
from pathlib import Path

import pytest

from headrace.base.errors import ModelFileError
from headrace.core.kv_group import KVGroup
from headrace.model.checkpoint import FileCheckpoint, open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.graph import Graph, Op, WeightRef

TINY = Path(__file__).parents[1] / "data" / "tiny"
MODELS = ("smollm2", "llama2", "llama3", "llama_yarn", "mistral", "qwen2", "qwen3", "gemma3")
ATTENTION = ["linear", "linear", "linear", "rope", "rope", "attention", "linear"]
NORMED_ATTENTION = [*["linear"] * 3, "rms_norm", "rms_norm", "rope", "rope", "attention", "linear"]
PLAIN_LAYER = ["rms_norm", *ATTENTION, "add", "rms_norm", "gated_mlp", "linear", "add"]
QK_LAYER = ["rms_norm", *NORMED_ATTENTION, "add", "rms_norm", "gated_mlp", "linear", "add"]
GEMMA_LAYER = [
    *("rms_norm", *NORMED_ATTENTION, "rms_norm", "add"),
    *("rms_norm", "gated_mlp", "linear", "rms_norm", "add"),
]
LAYERS = {"qwen3": QK_LAYER, "gemma3": GEMMA_LAYER}


def graph(model: str) -> Graph:
    checkpoint = open_checkpoint(TINY / model)
    return build_graph(checkpoint.config, checkpoint)


def first(model: str, kind: str) -> Op:
    return next(op for op in graph(model).ops if op.kind == kind)


@pytest.mark.parametrize("model", MODELS)
def test_operations_in_order(model: str) -> None:
    kinds = [op.kind for op in graph(model).ops]
    layers = 7 if model == "gemma3" else 2
    assert kinds == ["embed", *LAYERS.get(model, PLAIN_LAYER) * layers, "select_rows", "rms_norm", "linear"]


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_is_made_once_before_it_is_used(model: str) -> None:
    g = graph(model)
    known = {"input_ids", "output_rows"}
    for op in g.ops:
        assert set(op.inputs) <= known
        assert op.output not in known
        known.add(op.output)
    assert known == set(g.tensors)
    assert g.output == g.ops[-1].output == "logits"
    for axes in g.tensors.values():
        assert axes[0] in ("tokens", "rows")
        assert set(axes[1:]) <= set(g.axes)


@pytest.mark.parametrize("model", MODELS)
def test_every_stored_tensor_is_used(model: str) -> None:
    checkpoint = open_checkpoint(TINY / model)
    used = Counter(
        ref.name for op in build_graph(checkpoint.config, checkpoint).ops for ref in (*op.weights, op.bias) if ref
    )
    assert set(used) == set(checkpoint.names())
    assert [name for name, count in used.items() if count > 1] == (
        ["token_embd.weight"] if checkpoint.config.tie_word_embeddings else []
    )


def test_attention_of_a_llama() -> None:
    assert first("llama3", "attention").attrs == {
        "kv_group": 0, "layer": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25, "window": 0,
        "softcap": 0.0, "mask": "causal",
    }  # fmt: skip


def test_groups_of_a_model_without_windows() -> None:
    assert graph("llama3").kv_groups == (KVGroup("full", (0, 1), 2, 16),)


def test_groups_of_a_model_of_windows_only() -> None:
    assert graph("mistral").kv_groups == (KVGroup("window", (0, 1), 2, 32, 20),)


def test_gemma_has_local_and_global_layers() -> None:
    g = graph("gemma3")
    assert g.kv_groups == (
        KVGroup("full", (5,), 1, 32),
        KVGroup("window", (0, 1, 2, 3, 4, 6), 1, 32, 16),
    )
    attention = [op.attrs for op in g.ops if op.kind == "attention"]
    assert [(a["kv_group"], a["layer"], a["window"]) for a in attention] == [
        (1, 0, 16), (1, 1, 16), (1, 2, 16), (1, 3, 16), (1, 4, 16), (0, 0, 0), (1, 5, 16),
    ]  # fmt: skip
    assert attention[0]["scale"] == 24**-0.5
    ropes = [op.attrs["inv_freq"] for op in g.ops if op.kind == "rope"]
    assert len(set(ropes)) == 2
    assert ropes[0] == ropes[12] != ropes[10] == ropes[11]
    assert first("gemma3", "embed").attrs["scale"] == 8.0
    assert first("gemma3", "gated_mlp").attrs["activation"] == "gelu_tanh"
    assert first("gemma3", "rms_norm").weights[0].transform == "add_one"


def test_biases() -> None:
    def biased(model: str) -> set[str]:
        return {op.output.split(".")[-1] for op in graph(model).ops if op.bias}

    assert biased("qwen2") == {"attn_q", "attn_k", "attn_v"}
    assert biased("llama_yarn") == {"attn_q", "attn_k", "attn_v", "attn_output"}
    assert biased("qwen3") == set()


def test_head_norms_of_qwen_three() -> None:
    norms = [op for op in graph("qwen3").ops if op.kind == "rms_norm"]
    assert [(op.output, op.attrs["head_dim"]) for op in norms[:4]] == [
        ("blk.0.attn_norm", 0),
        ("blk.0.attn_q_norm", 32),
        ("blk.0.attn_k_norm", 32),
        ("blk.0.ffn_norm", 0),
    ]


def test_yarn_scales_cosine_and_sine() -> None:
    assert first("llama_yarn", "rope").attrs["scale"] == pytest.approx(1.1386294)
    assert first("llama3", "rope").attrs["scale"] == 1.0


def test_shards_split_what_tensor_parallelism_splits() -> None:
    shards = {op.output.split(".", 2)[-1]: op.shard for op in graph("llama3").ops if op.shard}
    assert shards == {
        "attn_q": "column", "attn_k": "column", "attn_v": "column", "attn_output": "row", "ffn_gated": "column",
        "ffn_down": "row", "logits": "vocab",
    }  # fmt: skip


class Altered:
    """A checkpoint with one tensor hidden or one added."""

    def __init__(self, inner: FileCheckpoint, hidden: str = "", added: str = "") -> None:
        self.path = inner.path
        self._inner, self._hidden, self._added = inner, hidden, added

    def names(self) -> list[str]:
        return [n for n in self._inner.names() if n != self._hidden] + [self._added] * bool(self._added)

    def has(self, name: str) -> bool:
        return name in self.names()

    def ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        if name == self._hidden:
            raise ModelFileError(self.path, name, "is missing")
        return self._inner.ref(name, shape)


def test_a_tensor_too_few_or_too_many() -> None:
    checkpoint = open_checkpoint(TINY / "llama3")
    with pytest.raises(ModelFileError, match=r"blk.1.ffn_up.weight: is missing"):
        build_graph(checkpoint.config, Altered(checkpoint, hidden="blk.1.ffn_up.weight"))  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match=r"blk.2.attn_q.weight: is not a tensor of a llama model"):
        build_graph(checkpoint.config, Altered(checkpoint, added="blk.2.attn_q.weight"))  # type: ignore[arg-type]
