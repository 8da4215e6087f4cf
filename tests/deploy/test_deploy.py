"""The deployment files: linted, and in agreement with the server's own flags."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.base.config import Config

DEPLOY = Path("deploy")
VARIABLES = {f"HEADRACE_{spec.name.upper()}" for spec in dataclasses.fields(Config)} | {"HEADRACE_CONFIG"}
DEFAULTS = {spec.name: spec.default for spec in dataclasses.fields(Config)}


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_dockerfile_lints() -> None:
    done = subprocess.run([tool("hadolint"), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_scripts_lint() -> None:
    scripts = [".ci/run", *map(str, Path("scripts").glob("*.sh")), *map(str, Path("benchmarks").glob("*.sh"))]
    done = subprocess.run([tool("shellcheck"), *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "headrace.service"])
def test_variables_exist(name: str) -> None:
    # HEADRACE_MODEL is both ours and compose's own substitution.
    assert set(re.findall(r"HEADRACE_[A-Z_]+", (DEPLOY / name).read_text())) <= VARIABLES


def test_compose_is_closed_by_default_and_waits_for_running_answers() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["headrace"]
    assert service["environment"]["HEADRACE_API_KEY"].startswith("${HEADRACE_API_KEY:?")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["read_only"] is True
    assert int(service["stop_grace_period"].removesuffix("s")) > DEFAULTS["shutdown_timeout"]


def test_image_runs_unprivileged_on_the_default_port() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "USER 10001" in text
    assert f"EXPOSE {DEFAULTS['port']}" in text
    assert f"127.0.0.1:{DEFAULTS['port']}/readyz" in text
    assert "--require-hashes" in text


def test_unit_has_every_section_and_outlasts_the_drain() -> None:
    text = (DEPLOY / "headrace.service").read_text()
    assert re.findall(r"^\[(\w+)\]$", text, re.M) == ["Unit", "Service", "Install"]
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"^[A-Z]\w+=", line))
    assert settings["Type"] == "notify"
    assert settings["DynamicUser"] == "yes"
    assert int(settings["TimeoutStopSec"].removesuffix("s")) > DEFAULTS["shutdown_timeout"]
