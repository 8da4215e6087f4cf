"""`headrace quantize` from a folder to a file that answers, on a small model made here."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.model.gguf import GGUFFile

HIDDEN, MLP, LAYERS = 64, 96, 2
TEXT = "The quick brown fox jumps over the lazy dog, 12 times. Don't ask why: it's what foxes do.\n" * 6


def tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th", "the", "\u0120the", "er"]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("e", "r")]
    library = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(texts[:3])
    return library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama in bfloat16 with a padded vocabulary and a tied head."""
    path = tmp_path / "tiny-llama"
    path.mkdir()
    library = tokenizer()
    library.save(str(path / "tokenizer.json"))
    vocab = library.get_vocab_size() + 9
    shapes = {"model.embed_tokens": (vocab, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        for part, shape in (
            ("input_layernorm", (HIDDEN,)), ("post_attention_layernorm", (HIDDEN,)),
            ("self_attn.q_proj", (HIDDEN, HIDDEN)), ("self_attn.k_proj", (32, HIDDEN)),
            ("self_attn.v_proj", (32, HIDDEN)), ("self_attn.o_proj", (HIDDEN, HIDDEN)),
            ("mlp.gate_proj", (MLP, HIDDEN)), ("mlp.up_proj", (MLP, HIDDEN)), ("mlp.down_proj", (HIDDEN, MLP)),
        ):  # fmt: skip
            shapes[f"model.layers.{i}.{part}"] = shape
    rng, header, data = np.random.default_rng(5), {}, b""
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0, 1.5 / shape[1] ** 0.5, shape)
        stored = values.astype(np.float32).view(np.uint16)[..., 1::2].tobytes()  # cut to bfloat16
        header[f"{name}.weight"] = {
            "dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(stored)]
        }  # fmt: skip
        data += stored
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "text.txt").write_text(TEXT)
    return path


def test_a_folder_becomes_a_file_that_answers_alike(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = str(tmp_path / "text.txt")
    assert main(["quantize", str(folder), "--text", text, "--max-tokens", "120", "--window", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny-llama.q8_0.gguf: 0.1 MB")
    assert "bits each" in lines[1] and "Q8_0" in lines[1]
    rows = [line.rsplit(maxsplit=6) for line in lines[3:]]
    assert [row[0] for row in rows] == ["weights alone", "as served"]
    assert [int(row[1]) for row in rows] == [118, 118]
    alone, served = (float(row[5]) for row in rows)
    assert 0 < alone < 0.01 and alone < served < 0.05
    params = SamplingParams(temperature=0.0, max_tokens=8)
    ends = []
    for model in (folder, tmp_path / "tiny-llama.q8_0.gguf"):
        with LLM(str(model), max_num_seqs=2, kv_cache_memory_bytes=1 << 20) as llm:
            (result,) = llm.generate("the quick 12", params, ignore_eos=True)
            ends.append((llm.tokenizer.eos_token_ids, llm.tokenizer.chat_template, result.prompt_token_ids))
            assert len(result.token_ids) == 8
    assert ends[0] == ends[1]


def test_fewer_bits_cost_more_and_the_head_keeps_eight_unless_asked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost, head = {}, {}
    for name, flags in {"q8_0": [], "q4_1": [], "q4_0": [], "all": ["--head-format", "q4_0"]}.items():
        file = tmp_path / f"{name}.gguf"
        fmt = "q4_0" if name == "all" else name
        text = ["--text", str(tmp_path / "text.txt"), "--max-tokens", "100"]
        assert main(["quantize", str(folder), "--format", fmt, "-o", str(file), *text, *flags]) == 0
        cost[name] = float(capsys.readouterr().out.splitlines()[3].split()[-2])
        head[name] = GGUFFile(file).tensors["token_embd.weight"].format
    assert cost["q8_0"] < cost["q4_1"] < cost["q4_0"] < cost["all"]
    assert head == {"q8_0": "Q8_0", "q4_1": "Q8_0", "q4_0": "Q8_0", "all": "Q4_0"}


def test_a_float_gguf_file_is_a_source_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floats, few = tmp_path / "floats.gguf", tmp_path / "few.gguf"
    assert main(["quantize", str(folder), "--format", "bf16", "-o", str(floats), "--no-quality"]) == 0
    assert main(["quantize", str(floats), "--format", "q5_0", "-o", str(few), "--no-quality"]) == 0
    assert "against float32" not in capsys.readouterr().out
    assert main(["quantize", str(folder), "--format", "q5_0", "-o", str(tmp_path / "b.gguf"), "--no-quality"]) == 0
    one, two = GGUFFile(few), GGUFFile(tmp_path / "b.gguf")
    for name in two.tensors:
        np.testing.assert_array_equal(one.read(name), two.read(name))


def test_wrong_calls_name_the_cure(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    call = ["quantize", str(folder), "-o", str(file), "--no-quality"]
    assert main(call) == 0
    assert main(call) == 1
    assert "exists; give --force to replace it" in capsys.readouterr().err
    assert main([*call, "--force"]) == 0
    assert main(["quantize", str(file), "--format", "q4_0", "-o", str(tmp_path / "n.gguf")]) == 1
    assert "start from the float weights" in capsys.readouterr().err
    assert main(["quantize", str(file), "-o", str(file), "--force"]) == 1
    assert "is the source itself" in capsys.readouterr().err
    assert main(["quantize", str(folder), "--format", "q4"]) == 2
    assert "did you mean q4_" in capsys.readouterr().err
    assert main(["quantize"]) == 2
    (folder / "tokenizer.json").unlink()
    assert main(["quantize", str(folder), "-o", str(tmp_path / "n.gguf")]) == 1
    assert "tokenizer.json: is missing" in capsys.readouterr().err
    assert not (tmp_path / "n.gguf").exists()
    assert not list(tmp_path.glob(".*.part"))


def test_a_model_too_large_to_compare_is_written_all_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engine.memory import Memory

    monkeypatch.setattr("headrace.engine.memory.available_memory", lambda: Memory(1000, "machine"))
    assert main(["quantize", str(folder), "-o", str(tmp_path / "m.gguf"), "--text", str(tmp_path / "text.txt")]) == 0
    said = capsys.readouterr()
    assert "the source in float32 needs 0.0 GB, 0.0 GB are free: errors weigh alike" in said.err
    assert "against float32" not in said.out
    assert (tmp_path / "m.gguf").exists()


def test_knowing_which_weights_matter_costs_less(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gains of this model make a few inputs large, as they are in real ones."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if "layernorm" in name:
            gains = np.full(HIDDEN, 0.2, np.float32)
            gains[::9] = 4
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            data[begin:end] = gains.view(np.uint16)[1::2].tobytes()
    (folder / "model.safetensors").write_bytes(data)
    cost = {}
    for tokens in ("0", "64"):
        file = str(tmp_path / f"{tokens}.gguf")
        text = ["--text", str(tmp_path / "text.txt"), "--max-tokens", "100", "--calibration-tokens", tokens]
        assert main(["quantize", str(folder), "--format", "q4_1", "-o", file, *text]) == 0
        cost[tokens] = float(capsys.readouterr().out.splitlines()[3].split()[-2])
    assert cost["64"] < 0.8 * cost["0"]
