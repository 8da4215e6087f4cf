"""Headrace: an LLM inference server that turns uneven live traffic into efficient model execution.

`from headrace import LLM` gives in-process generation; everything else is reached through the `headrace` command.
Imports here are lazy so that `headrace --help` stays instant.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.request import SamplingParams
    from headrace.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from headrace.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from headrace.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
