"""The model behind `--backend fake`: a byte-level vocabulary, a chat template and an oracle, without any file.

It says one line over and over, ending its turn after each; above temperature 0 some bytes differ, by seed. So a server
on it behaves like one on a real model in all but the sense of its answers: turns end, characters span tokens, seeds,
penalties and logprobs matter, and a KV block that is read wrongly changes the answer or raises.
"""

from typing import TYPE_CHECKING

from headrace.backend.base import BackendSpec
from headrace.backend.fake import FakeBackend, Oracle, Prefix, hash_oracle
from headrace.core.kv_group import KVGroup

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

NAME = "fake"
MAX_POSITION = 4096
LINE = "The headrace carries water to the wheel, évenly, and the mill turns 🌊. "
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 256 + len(_CONTROL)
END_OF_TURN = VOCAB_SIZE - 1


def fake_tokenizer() -> "Tokenizer":
    """Token i is byte i; then the control tokens of ChatML."""
    from headrace.text.byte_level import BYTE_OF_LETTER
    from headrace.text.tokenizer import Tokenizer  # the engine process, which needs no text, starts without it

    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    metadata = {
        "general.name": NAME,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [letters[byte] for byte in range(256)] + list(_CONTROL),
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(_CONTROL),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": END_OF_TURN,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }
    return Tokenizer.from_gguf(metadata, NAME)


def fake_groups() -> tuple[KVGroup, ...]:
    """One full group; a token costs one KiB of imagined memory."""
    return (KVGroup("full", tuple(range(4)), 2, 32),)


def fake_oracle() -> Oracle:
    script = [*LINE.encode(), END_OF_TURN]
    others = hash_oracle(sorted(set(LINE.encode())), 4)

    def candidates(prefix: Prefix) -> list[int]:
        first = script[(prefix.position + 1) % len(script)]
        return [first, *(token for token in dict.fromkeys(others(prefix)) if token != first)]

    return candidates


def fake_backend(spec: BackendSpec) -> FakeBackend:
    return FakeBackend(spec, fake_oracle())
