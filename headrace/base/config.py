"""The one frozen configuration, and how it is read. The only file that reads the environment.

Layers, strongest first: command-line flag, HEADRACE_<NAME> variable, TOML key, default. A flag is the field's name with
dashes; a boolean field also has --no-<name>. Where vLLM has a flag for the same thing, the field has vLLM's name.
Options of one command only (`bench`, `run`, ...) are further frozen dataclasses made of `option` fields: their
variables are HEADRACE_<COMMAND>_<NAME> and their TOML keys stand in a table named after the command.
"""

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.errors import ConfigError

T = TypeVar("T")

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_COUNTS = {"": 1, "k": 1000, "m": 1_000_000, "ki": 1 << 10, "mi": 1 << 20}


def option(default: Any, doc: str, **extra: Any) -> Any:
    """A field with its doc line. `extra`: `choices`, `size` (takes 512M), `count` (takes 8k), `minimum`, `maximum`,
    `short` (a second flag of one letter)."""
    return field(default=default, metadata={"doc": doc, **extra})


@dataclass(frozen=True)
class Config:
    """What a server or an in-process engine is made of. Every field is a flag, a variable and a TOML key."""

    model: str = option("smollm2-135m", "Catalog name, path to a GGUF file or Hugging Face folder, or hub id.")
    host: str = option("127.0.0.1", "Address to listen on. Beyond loopback an API key is required.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    served_model_name: str = option("", "Name that the API shows; the model's own name when empty.")
    api_key: str = option("", "Key that clients send as a bearer token; several are separated by commas.", secret=True)
    max_model_len: int = option(
        0,
        "Most tokens of prompt plus output per request; 0: what the model knows and memory holds.",
        count=True,
        minimum=0,
    )
    max_num_seqs: int = option(64, "Most sequences in one step.", count=True, minimum=1, maximum=4096)
    max_num_batched_tokens: int = option(
        512, "Most tokens in one step: the budget that prompts share in chunks.", count=True, minimum=1, maximum=65536
    )
    max_waiting: int = option(
        1024, "Most requests waiting; more are refused with 503 and retry-after.", count=True, minimum=0
    )
    block_size: int = option(32, "KV cache tokens per block.", choices=(16, 32))
    kv_cache_memory_bytes: int = option(
        0, "Bytes of KV cache; 0: a safe share of what the machine or cgroup has free.", size=True, minimum=0
    )
    kv_cache_dtype: str = option(
        "auto",
        "Numbers of the KV cache. bf16; int8: half the memory, for a little quality (docs/quality.md); auto: bf16.",
        choices=("auto", "bf16", "int8"),
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of equal prompt prefixes.")
    chat_template: str = option(
        "", "Path to a Jinja chat template, or the template itself, instead of the model's own."
    )
    generation_config: str = option(
        "auto", "auto: sampling defaults from generation_config.json; none: neutral ones.", choices=("auto", "none")
    )
    seed: int = option(
        0, "Base seed of requests that give none; 0 draws a fresh one per request.", minimum=0, maximum=(1 << 63) - 1
    )
    backend: str = option("cpu", "cpu: own native kernels; fake: a token oracle for tests.", choices=("cpu", "fake"))
    isa: str = option("auto", "Instruction set of the kernels.", choices=("auto", "reference", "avx2", "avx512"))
    threads: int = option(
        0, "Compute threads; 0: min(affinity, cgroup quota, physical cores).", minimum=0, maximum=1024
    )
    shutdown_timeout: float = option(30.0, "Seconds that running requests get to finish at SIGTERM.", minimum=0)
    keep_alive_interval: float = option(
        15.0, "Seconds of silence before a stream gets a keep-alive comment.", minimum=0.01
    )
    cache_dir: str = option("", "Folder of fetched models and measurements; empty: XDG_CACHE_HOME/headrace.")
    pack_cache: str = option(
        "", "Folder that keeps packed weights for the next start; off: pack anew; empty: `packed` in the cache folder."
    )
    pack_cache_bytes: int = option(
        8 << 30, "Most bytes of packed weights to keep; the least recently used go.", size=True, minimum=0
    )
    log_level: str = option("info", "Log level.", choices=("debug", "info", "warning", "error"))
    self_test: bool = option(True, "Measure prefill and decode speed once, on idle time after readiness.")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def load(
    cls: type[T], flags: Mapping[str, Any], environ: Mapping[str, str], table: Mapping[str, Any], command: str = ""
) -> T:
    """Builds an options dataclass from its layers; `flags` holds only what was given on the command line.

    Raises ConfigError that names the flag, variable or key at fault.
    """
    prefix = f"HEADRACE_{command.upper()}_" if command else "HEADRACE_"
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]
        variable = prefix + spec.name.upper()
        if spec.name in flags:
            values[spec.name] = parse(spec, flags[spec.name], flag(spec.name))
        elif variable in environ:
            values[spec.name] = parse(spec, environ[variable], variable)
        elif spec.name in table:
            values[spec.name] = parse(spec, table[spec.name], f"TOML key {spec.name}")
    return cls(**values)


def parse(spec: "dataclasses.Field[Any]", value: Any, where: str) -> Any:
    """One value as its field wants it. Raises ConfigError naming `where`."""
    kind = type(spec.default)
    try:
        result = _convert(kind, value, spec.metadata)
    except (ValueError, OverflowError) as error:
        shown = "a secret" if spec.metadata.get("secret") else repr(value)
        raise ConfigError(f"{where}: {shown} is not {_expected(kind, spec.metadata)}") from error
    choices = spec.metadata.get("choices")
    if choices and result not in choices:
        hint = nearest(str(result), map(str, choices))
        raise ConfigError(f"{where}: {result!r} is not one of {', '.join(map(str, choices))}{hint}")
    low, high = spec.metadata.get("minimum"), spec.metadata.get("maximum")
    if low is not None and result < low:
        raise ConfigError(f"{where}: {result} is below the least allowed, {low}")
    if high is not None and result > high:
        raise ConfigError(f"{where}: {result} is above the most allowed, {high}")
    return result


def _convert(kind: type, value: Any, metadata: Mapping[str, Any]) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]
    if isinstance(value, bool):
        raise ValueError(value)
    if kind is int:
        if isinstance(value, int):
            return value
        if metadata.get("size"):
            return _scaled(str(value), _SIZES, ("b", "ib"))
        return _scaled(str(value), _COUNTS, ()) if metadata.get("count") else int(str(value))
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _scaled(text: str, units: Mapping[str, int], endings: tuple[str, ...]) -> int:
    """`512M`, `1.5GiB`, `8k` as an integer."""
    cleaned = text.strip().lower().replace("_", "")
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = cleaned[len(digits) :]
    for ending in sorted(endings, key=len, reverse=True):
        if unit.endswith(ending) and unit[: -len(ending)] in units:
            unit = unit[: -len(ending)]
            break
    if unit not in units:
        raise ValueError(text)
    amount = float(digits) * units[unit]
    if amount != int(amount):
        raise ValueError(text)
    return int(amount)


def _expected(kind: type, metadata: Mapping[str, Any]) -> str:
    if metadata.get("size"):
        return "a size such as 512M or 2G"
    if metadata.get("count"):
        return "a count such as 4096 or 8k"
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}[kind]


def read_toml(path: str) -> dict[str, Any]:
    """The configuration file. Raises ConfigError naming the file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"config file {path}: {error}") from error


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raises ConfigError for a key that nothing reads, naming the nearest known one."""
    names = list(known)
    for key in table:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, names)}")


def environment() -> Mapping[str, str]:
    """The process environment, for `load`."""
    return os.environ


def check_environment(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Warnings for HEADRACE_ variables that nothing reads: a typo there is otherwise silent."""
    names = set(known)
    return [
        f"environment variable {name} is not known{nearest(name, names)}"
        for name in environ
        if name.startswith("HEADRACE_") and name not in names
    ]


def cache_dir(config_value: str = "") -> Path:
    """Folder of fetched models: the configured one, else HEADRACE_CACHE_DIR, else XDG_CACHE_HOME/headrace."""
    if config_value:
        return Path(config_value).expanduser()
    own = os.environ.get("HEADRACE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def pack_folder(config: Config) -> Path | None:
    """Where packed weights are kept; None: nowhere."""
    if config.pack_cache == "off":
        return None
    return Path(config.pack_cache).expanduser() if config.pack_cache else cache_dir(config.cache_dir) / "packed"


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a child process: ours, native pools of libraries held to one thread, plus `extra`."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return {**os.environ, **single, "TOKENIZERS_PARALLELISM": "false", **extra}


def notify_socket() -> str:
    """systemd's notification socket, or nothing."""
    return os.environ.get("NOTIFY_SOCKET", "")
