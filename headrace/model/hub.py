"""Models from a Hugging Face hub, through huggingface_hub, which resumes, checks and caches by itself.

A spec is `owner/name`, or `owner/name:FILE.gguf`, or `owner/name:QUANT` (say Q4_K_M) for a repository of GGUF files.
Only what a text decoder needs is fetched; code that a repository may carry is never fetched, let alone run.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from headrace.base.errors import FetchError, ModelNotFoundError

Progress = Callable[[str, int, int], None]

_WANTED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_WANTED_TOO = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "model.safetensors.index.json")
_POLL_SECONDS = 0.1
_GGUF_ORDER = ("Q4_K_M", "Q4_1", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "Q4_K_S", "BF16", "F16", "F32")


def fetch_hub(spec: str, progress: Progress) -> Path:
    """The local folder (safetensors) or file (GGUF) of a hub model.

    Raises ModelNotFoundError when the hub has no such model, FetchError when it cannot be reached or lacks files.
    """
    from huggingface_hub import constants

    repo, _, wanted = spec.partition(":")
    sizes = _cached_files(repo) if constants.HF_HUB_OFFLINE else _list_files(repo)
    files = list(sizes)
    gguf = [name for name in files if name.lower().endswith(".gguf")]
    if wanted or (gguf and "config.json" not in files) or (gguf and not _safetensors(files)):
        chosen = _choose_gguf(repo, gguf, wanted)
        return _download(repo, {chosen: sizes[chosen]}, progress)[0]
    weights = _safetensors(files)
    if not weights or "config.json" not in files:
        raise FetchError(f"{repo} holds neither GGUF files nor safetensors with a config.json")
    names = [name for name in files if name in _WANTED + _WANTED_TOO] + weights
    return _download(repo, {name: sizes[name] for name in names}, progress)[0].parent


def _safetensors(files: list[str]) -> list[str]:
    return sorted(name for name in files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name))


def _choose_gguf(repo: str, names: list[str], wanted: str) -> str:
    whole = [name for name in names if not re.search(r"-\d{5}-of-\d{5}\.gguf$", name)]
    if wanted:
        matches = [name for name in whole if name == wanted or wanted.lower() in name.lower()]
        if not matches:
            raise ModelNotFoundError(f"{repo} has no GGUF file like {wanted!r}; it has {', '.join(whole) or 'none'}")
        return min(matches, key=len)
    for quant in _GGUF_ORDER:
        for name in sorted(whole, key=len):
            if quant.lower() in name.lower():
                return name
    if not whole:
        raise FetchError(f"{repo} has only split GGUF files, which are not supported; name another repository")
    return sorted(whole)[0]


def _list_files(repo: str) -> dict[str, int]:
    """The repository's files with their sizes in bytes."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo, files_metadata=True)
    except Exception as error:  # the library raises its own HTTP client's errors too
        raise _translated(repo, error) from error
    return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}


def _cached_files(repo: str) -> dict[str, int]:
    """What the hub's cache holds of the repository's newest snapshot, for HF_HUB_OFFLINE."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except Exception as error:
        raise FetchError(f"{repo} is not in the hub cache and HF_HUB_OFFLINE is set") from error
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _download(repo: str, sizes: dict[str, int], progress: Progress) -> list[Path]:
    """Fetches files one by one; reports the bytes that have arrived in the hub's cache meanwhile."""
    from huggingface_hub import hf_hub_download

    total, finished = sum(sizes.values()), 0
    paths = []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub") as thread:
        for name, size in sizes.items():
            before = _blob_bytes(repo)
            pending = thread.submit(hf_hub_download, repo, name)
            while not wait({pending}, timeout=_POLL_SECONDS).done:
                arrived = min(size, max(0, _blob_bytes(repo) - before))
                progress(f"downloading {name}", finished + arrived, total)
            try:
                paths.append(Path(pending.result()))
            except Exception as error:
                raise _translated(repo, error) from error
            finished += size
            progress(f"downloading {name}", finished, total)
    return paths


def _blob_bytes(repo: str) -> int:
    """Bytes of the repository in the hub's cache, of unfinished files too."""
    folder = hub_folder(repo)
    total = 0
    for path in (folder / "blobs").glob("*") if folder else ():
        with suppress(FileNotFoundError):  # an unfinished file is renamed while we look
            total += path.stat().st_size
    return total


def _translated(repo: str, error: Exception) -> FetchError | ModelNotFoundError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(f"{repo} is gated: accept its licence on the hub and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"the hub has no model {repo} (or it is private and HF_TOKEN is not set)")
    return FetchError(f"cannot fetch {repo} from the hub: {error}")


def hub_folder(repo: str) -> Path | None:
    """Where the hub's cache keeps a repository, or None when it holds nothing of it."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.partition(':')[0].replace('/', '--')}"
    return folder if folder.is_dir() else None
