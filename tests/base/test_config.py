"""Layers, units and errors of the configuration."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config import Config, cache_dir, check_environment, check_keys, flag, load, parse, read_toml
from headrace.base.errors import ConfigError

FIELDS = {spec.name: spec for spec in dataclasses.fields(Config)}


def test_flag_beats_variable_beats_toml_beats_default() -> None:
    table = {"port": 1, "host": "from-toml", "max_num_seqs": 7}
    environ = {"HEADRACE_PORT": "2", "HEADRACE_HOST": "from-variable"}
    config = load(Config, {"port": "3"}, environ, table)
    assert (config.port, config.host, config.max_num_seqs) == (3, "from-variable", 7)
    assert config.model == "smollm2-135m"


def test_every_field_has_a_doc_line_and_its_default_passes_its_own_checks() -> None:
    for spec in FIELDS.values():
        assert spec.metadata["doc"].endswith(".")
        assert parse(spec, spec.default, spec.name) == spec.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "8k", 8000),
        ("max_model_len", "4Ki", 4096),
        ("kv_cache_memory_bytes", "512M", 512 << 20),
        ("kv_cache_memory_bytes", "1.5GiB", 3 << 29),
        ("kv_cache_memory_bytes", "1000", 1000),
        ("enable_prefix_caching", "no", False),
        ("block_size", "16", 16),
        ("shutdown_timeout", "2.5", 2.5),
    ],
)
def test_values_as_people_write_them(name: str, text: str, value: object) -> None:
    assert parse(FIELDS[name], text, name) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("port", "eighty", "--port: 'eighty' is not a whole number"),
        ("port", "70000", "above the most allowed, 65535"),
        ("port", True, "not a whole number"),
        ("block_size", "24", "not one of 16, 32"),
        ("backend", "cpy", r"did you mean cpu\?"),
        ("kv_cache_memory_bytes", "12 parsecs", "not a size such as 512M"),
        ("max_model_len", "1.0001k", "not a count"),
        ("shutdown_timeout", "nan", "not a finite number"),
        ("shutdown_timeout", "-1", "below the least allowed"),
        ("enable_prefix_caching", "maybe", "not true or false"),
    ],
)
def test_errors_name_the_place_and_the_cure(name: str, text: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(FIELDS[name], text, flag(name))


def test_a_wrong_key_is_never_echoed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(FIELDS["api_key"], 12345, "HEADRACE_API_KEY")
    assert "12345" not in str(caught.value)


@given(st.text(max_size=12))
def test_no_text_crashes_a_parser(text: str) -> None:
    for spec in FIELDS.values():
        try:
            parse(spec, text, "here")
        except ConfigError as error:
            assert str(error).startswith("here: ")


def test_toml_errors_name_the_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("port = ")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        read_toml(str(bad))
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(str(tmp_path / "absent.toml"))


def test_unknown_keys_and_variables_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'prot' \(did you mean port\?\)"):
        check_keys({"prot": 1}, FIELDS, "config file")
    warnings = check_environment({"HEADRACE_PROT": "1", "PATH": "/bin"}, ["HEADRACE_PORT"])
    assert warnings == ["environment variable HEADRACE_PROT is not known (did you mean HEADRACE_PORT?)"]


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert cache_dir("/given") == Path("/given")
