"""Fixtures that more than one room uses: real model files, fetched once into the cache and checked by hash."""

from pathlib import Path

import pytest

from headrace.model.fetch import fetch_catalog


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (98 MB, Apache-2.0)."""
    return fetch_catalog("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M (253 MB, Gemma licence). Only `make parity` asks for it."""
    return fetch_catalog("gemma3-270m")
