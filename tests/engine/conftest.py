"""A model folder with everything that a user's has: tiny random weights, a tokenizer, a template, end tokens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

TINY = Path(__file__).parents[1] / "data" / "tiny" / "smollm2"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its tokenizer is byte-level; one end token stands in each of the places that may name one."""
    path = tmp_path / "model"
    shutil.copytree(TINY, path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_end|>", "<a>", "<b>")])
    tokenizer.save(str(path / "tokenizer.json"))
    edit(path / "config.json", lambda config: config.update(eos_token_id=5))
    edit(path / "generation_config.json", lambda config: config.update(eos_token_id=[6], temperature=0.3, top_k=7))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
