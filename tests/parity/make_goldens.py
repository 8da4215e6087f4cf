"""Make the golden logits and tokens, from Hugging Face transformers and nothing else.

    python tests/parity/make_goldens.py            write tests/data/tiny/*/ and tests/data/goldens/*.npz
    python tests/parity/make_goldens.py --check    recompute and compare with the committed files
    ... --only NAME                                one tiny model or one real one (smollm2-135m, gemma3-270m)

Needs torch and transformers (requirements/parity.txt). All arithmetic is float32 with eager attention. From headrace it
uses only `model.fetch`, to find the GGUF files; what is computed never passes through our code.

Real models: for every prompt of tests/data/goldens/prompts.json (ids by llama.cpp's tokeniser), 64 greedy tokens, and
for each of these steps the 16 largest logits and the logarithm of the sum of all exponentials, from one teacher-forced
pass without a cache.
Tiny models: the checkpoint itself (safetensors and config.json), the prompt, 32 greedy tokens, and every logit row.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gguf_models
import numpy as np
import tiny_models
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "tiny"
GOLDENS = ROOT / "tests" / "data" / "goldens"
REAL_MODELS = ("smollm2-135m", "gemma3-270m")
REAL_TOKENS, REAL_TOP = 64, 16
TINY_PROMPT, TINY_TOKENS = 56, 32
# Two machines sum float32 in different orders. A golden that moved more than this was not made by the same model.
CHECK_TOLERANCE = 5e-3
MAX_PERPLEXITY = 60.0
Arrays = dict[str, np.ndarray]


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """By transformers' own `generate` with its cache; no token ends it early."""
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)
    model.generation_config.eos_token_id = None  # generate() fills what `config` leaves open from here
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    if len(tokens) != count:
        raise ValueError(f"generate stopped after {len(tokens)} of {count} tokens")
    return tokens


def forced(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocab] of one pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def check_agreement(name: str, tokens: list[int], logits: torch.Tensor) -> None:
    """The cached and the uncached pass must choose the same token, or the two candidates must be all but equal."""
    top = logits.topk(2).values
    for step, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        if int(row.argmax()) != token and float(top[step, 0] - top[step, 1]) > 1e-3:
            raise ValueError(f"{name}: step {step}: cached and uncached passes disagree beyond rounding")


def real_goldens(name: str) -> Arrays:
    sys.path.insert(0, str(ROOT))
    from headrace.model.fetch import fetch_catalog

    path = fetch_catalog(name)
    model = gguf_models.load(path)
    count = gguf_models.check_weights(model, path)
    prompts = json.loads((GOLDENS / "prompts.json").read_text())[name]
    perplexity = gguf_models.perplexity(model, prompts["long"]["ids"])
    print(f"{name}: {count} tensors equal to the file's, perplexity of the long prompt {perplexity:.1f}")
    if perplexity > MAX_PERPLEXITY:
        raise ValueError(f"{name}: perplexity {perplexity:.1f} is not that of a working model")
    arrays: Arrays = {}
    for prompt, entry in prompts.items():
        tokens = greedy(model, entry["ids"], REAL_TOKENS)
        logits = forced(model, entry["ids"] + tokens[:-1])[len(entry["ids"]) - 1 :]
        check_agreement(f"{name}/{prompt}", tokens, logits)
        values, ids = logits.topk(REAL_TOP)
        arrays[f"{prompt}.tokens"] = np.array(tokens, dtype=np.int32)
        arrays[f"{prompt}.top_ids"] = ids.numpy().astype(np.int32)
        arrays[f"{prompt}.top_logits"] = values.numpy().astype(np.float32)
        arrays[f"{prompt}.logsumexp"] = logits.logsumexp(dim=1).numpy().astype(np.float32)
        print(f"{name}/{prompt}: {len(entry['ids'])} + {REAL_TOKENS} tokens", flush=True)
    return arrays


def tiny_goldens(tiny: tiny_models.TinyModel, folder: Path) -> Arrays:
    """Save the checkpoint into `folder`, and compute from what was saved."""
    model = tiny_models.build(tiny)
    model.to(tiny.dtype).save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, tiny.config.vocab_size, (TINY_PROMPT,), generator=generator).tolist()
    tokens = greedy(model, prompt, TINY_TOKENS)
    logits = forced(model, prompt + tokens[:-1])
    check_agreement(tiny.name, tokens, logits[TINY_PROMPT - 1 :])
    return {
        "prompt": np.array(prompt, dtype=np.int32),
        "tokens": np.array(tokens, dtype=np.int32),
        "logits": logits.numpy(),
    }


def compare(name: str, made: Arrays, committed: Path) -> list[str]:
    """What differs between recomputed and committed goldens, in words."""
    stored = np.load(committed)
    if set(stored.files) != set(made):
        return [f"{name}: arrays {sorted(set(stored.files) ^ set(made))} are on one side only"]
    problems = []
    for key, values in made.items():
        if key.endswith("top_ids"):
            continue  # equal logits may swap places; the values and the tokens say all that matters
        if values.dtype == np.float32:
            worst = float(np.abs(values - stored[key]).max())
            if worst > CHECK_TOLERANCE:
                problems.append(f"{name}: {key} moved by {worst:.2e}")
        elif not np.array_equal(values, stored[key]):
            problems.append(f"{name}: {key} differs")
    return problems


def files_differ(name: str, made: Path, committed: Path) -> list[str]:
    """Weights must be the same bytes; config.json the same apart from the version that wrote it."""
    problems = []
    for path in sorted(made.glob("*.safetensors")):
        if path.read_bytes() != (committed / path.name).read_bytes():
            problems.append(f"{name}: {path.name} differs")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (made, committed)]
    for config in configs:
        config.pop("transformers_version", None)
    if configs[0] != configs[1]:
        problems.append(f"{name}: config.json differs")
    return problems


def run_tiny(tiny: tiny_models.TinyModel, check: bool) -> list[str]:
    target = TINY / tiny.name
    if not check:
        np.savez_compressed(target / "golden.npz", **tiny_goldens(tiny, target))
        return []
    with tempfile.TemporaryDirectory() as work:
        arrays = tiny_goldens(tiny, Path(work))
        return files_differ(tiny.name, Path(work), target) + compare(tiny.name, arrays, target / "golden.npz")


def run_real(name: str, check: bool) -> list[str]:
    arrays, target = real_goldens(name), GOLDENS / f"{name}.npz"
    if check:
        return compare(name, arrays, target)
    np.savez_compressed(target, **arrays)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or check the goldens.")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    parser.add_argument("--only", default="", help="one model")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    problems: list[str] = []
    for tiny in tiny_models.tiny_models():
        if options.only in ("", tiny.name):
            problems += run_tiny(tiny, options.check)
            print(f"tiny {tiny.name}: done", flush=True)
    for name in REAL_MODELS:
        if options.only in ("", name):
            problems += run_real(name, options.check)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
