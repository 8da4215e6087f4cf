"""ModelConfig from GGUF metadata, and what it fills in that the file does not say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import llama_metadata, llama_tensors, write_gguf

from headrace.base.errors import ModelFileError
from headrace.model.config import ModelConfig, RopeScaling
from headrace.model.gguf import GGUFFile
from headrace.model.gguf_config import config_from_gguf


def read(path: Path, arch: str = "llama", extra: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    metadata = {k.replace("llama.", f"{arch}."): v for k, v in llama_metadata(**changes).items()}
    tensors = llama_tensors() | (extra or {})
    return config_from_gguf(GGUFFile(write_gguf(path / "m.gguf", arch, metadata, tensors)))


def test_llama(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelConfig(
        family="llama", name="tiny", vocab_size=6, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, intermediate_size=24, max_position=64, rms_norm_eps=float(np.float32(1e-5)), rope_base=10000.0,
        tie_word_embeddings=True, eos_token_ids=(0,), bos_token_id=None,
    )  # fmt: skip


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    output = {"output.weight": np.zeros((6, 16), dtype=np.float32)}
    assert not read(tmp_path, extra=output).tie_word_embeddings


def test_end_ids_are_those_that_the_metadata_names(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (0,)
    assert read(tmp_path, tokenizer__ggml__eos_token_id=None, tokenizer__ggml__eot_token_id=4).eos_token_ids == (4,)
    assert read(tmp_path, tokenizer__ggml__eos_token_id=0xFFFFFFFF).eos_token_ids == ()


def test_rope_scaling(tmp_path: Path) -> None:
    assert read(tmp_path, llama__rope__scaling__type="none").rope_scaling == RopeScaling()
    linear = read(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=8.0)
    assert linear.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    yarn = read(
        tmp_path,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=32,
        llama__rope__scaling__attn_factor=2.0,
    ).rope_scaling
    assert (yarn.factor, yarn.original_max_position) == (4.0, 32)
    assert yarn.attention_factor == pytest.approx(2 * 1.1386294)


def test_rope_divisors_are_read_from_their_tensor(tmp_path: Path) -> None:
    divisors = np.array([1, 1, 2, 8], dtype=np.float32)
    assert read(tmp_path, extra={"rope_freqs.weight": divisors}).rope_factors == (1.0, 1.0, 2.0, 8.0)


def test_gemma_three_gets_what_its_metadata_lacks(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma3", llama__block_count=12, llama__attention__sliding_window=16)
    assert config.window_pattern == ((True,) * 5 + (False,)) * 2
    assert (config.rope_base_local, config.attention_scale) == (10000.0, 8**-0.5)
    assert (config.activation, config.sandwich_norms, config.qk_norm) == ("gelu_tanh", True, True)
    assert config.embedding_scale == 4.0
    assert not config.norm_add_one  # the converter has added the one already


def test_gemma_three_of_27b_scales_queries_by_its_hidden_size(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma3", llama__block_count=62, llama__attention__key_length=4)
    assert config.attention_scale == pytest.approx((16 / 2) ** -0.5)


def test_gemma_metadata_wins_where_it_speaks(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "gemma3",
        llama__block_count=4,
        llama__attention__sliding_window=16,
        llama__attention__sliding_window_pattern=2,
        llama__rope__freq_base_swa=5000.0,
    )
    assert config.window_pattern == (True, False, True, False)
    assert config.rope_base_local == 5000.0


def test_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'rwkv' is not supported; supported: llama, qwen2, qwen3, gemma3"):
        read(tmp_path, "rwkv")
