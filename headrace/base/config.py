"""The one frozen configuration. The only file that reads the environment.

Layers, strongest first: command-line flag, HEADRACE_<NAME> variable, TOML key, default. A flag is the field's name with
dashes. Where vLLM has a flag for the same thing, the field has vLLM's name.
"""

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, doc: str, **extra: Any) -> Any:
    """A field with its doc line. `extra` may hold `choices`, `short`, `size` (bytes: accepts 512M), `count` (accepts 8k)."""
    return field(default=default, metadata={"doc": doc, **extra})


@dataclass(frozen=True)
class Config:
    model: str = option("smollm2-135m", "Catalog name, path to a GGUF file or Hugging Face folder, or hub id.")
    host: str = option("127.0.0.1", "Address to listen on. Beyond loopback an API key is required.")
    port: int = option(8000, "Port to listen on.")
    served_model_name: str = option("", "Name that the API shows; the model's own name when empty.")
    api_key: str = option("", "Key that clients must send as a bearer token; several are separated by commas.")
    max_model_len: int = option(0, "Most tokens of prompt plus output per request; 0 takes what the model was trained for and memory holds.", count=True)
    max_num_seqs: int = option(64, "Most sequences in one step.")
    max_num_batched_tokens: int = option(512, "Most tokens in one step: the token budget that chunked prefill shares.", count=True)
    max_waiting: int = option(1024, "Most requests waiting; more are refused with 503 and retry-after.", count=True)
    block_size: int = option(32, "KV cache tokens per block.", choices=(16, 32))
    kv_cache_memory: int = option(0, "Bytes of KV cache; 0 takes a safe share of what the machine or cgroup has free.", size=True)
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of equal prompt prefixes.")
    chat_template: str = option("", "Path to a Jinja chat template, or the template itself, instead of the model's own.")
    generation_config: str = option("auto", "auto: defaults from the model's generation_config.json; none: neutral defaults.", choices=("auto", "none"))
    seed: int = option(0, "Base seed of requests that give none; 0 draws a fresh one per request.")
    backend: str = option("cpu", "cpu: own native kernels; fake: a token oracle for tests.", choices=("cpu", "fake"))
    isa: str = option("auto", "Instruction set of the kernels.", choices=("auto", "reference", "avx2", "avx512"))
    threads: int = option(0, "Compute threads; 0: min(affinity, cgroup quota, physical cores).")
    shutdown_timeout: float = option(30.0, "Seconds that running requests get to finish at SIGTERM.")
    keep_alive_interval: float = option(15.0, "Seconds of silence after which a stream gets a keep-alive comment.")
    cache_dir: str = option("", "Folder of fetched and packed models; empty: XDG_CACHE_HOME/headrace.")
    log_level: str = option("info", "Log level.", choices=("debug", "info", "warning", "error"))
    self_test: bool = option(True, "Measure prefill and decode speed once on idle time after readiness.")
