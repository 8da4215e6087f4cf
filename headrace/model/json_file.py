"""Strict reading of JSON objects from model files: what is not one object of sound JSON is a ModelFileError."""

import json
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFileError


def parse_object(path: Path, field: str, data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises ModelFileError for bad JSON or UTF-8, a key that occurs twice, or no object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ModelFileError(path, field, f"the key {key!r} occurs twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ModelFileError(path, field, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, field, "is not a JSON object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that the file holds. Raises ModelFileError also when the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(path, "file", f"cannot be read: {error.strerror}") from None
    return parse_object(path, "file", data)
