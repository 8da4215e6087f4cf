"""The committed goldens (tests/data), read. make_goldens.py made them."""

import json
from pathlib import Path

import numpy as np
from agreement import Golden

DATA = Path(__file__).parents[1] / "data"
TINY_MODELS = ("smollm2", "llama2", "llama3", "llama_yarn", "mistral", "qwen2", "qwen3", "gemma3")


def real_goldens(model: str) -> dict[str, Golden]:
    """Prompt name -> golden of a catalog model."""
    prompts = json.loads((DATA / "goldens" / "prompts.json").read_text(encoding="utf-8"))[model]
    with np.load(DATA / "goldens" / f"{model}.npz") as arrays:
        return {
            name: Golden(
                entry["ids"],
                arrays[f"{name}.tokens"].tolist(),
                arrays[f"{name}.top_ids"],
                arrays[f"{name}.top_logits"],
                arrays[f"{name}.logsumexp"],
            )
            for name, entry in prompts.items()
        }


def tiny_folder(model: str) -> Path:
    return DATA / "tiny" / model


def tiny_golden(model: str) -> Golden:
    """The generated part: every logit of the vocabulary counts as a stored one."""
    with np.load(tiny_folder(model) / "golden.npz") as arrays:
        prompt, tokens, logits = arrays["prompt"].tolist(), arrays["tokens"].tolist(), arrays["logits"]
    rows = logits[len(prompt) - 1 :]
    order = np.argsort(-rows, axis=1, kind="stable")
    return Golden(prompt, tokens, order, np.take_along_axis(rows, order, axis=1), np.logaddexp.reduce(rows, axis=1))


def tiny_prompt_logits(model: str) -> np.ndarray:
    """Logits [P - 1, vocab] of the prompt's positions before the last."""
    with np.load(tiny_folder(model) / "golden.npz") as arrays:
        return arrays["logits"][: len(arrays["prompt"]) - 1]
