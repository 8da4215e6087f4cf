"""Turns options dataclasses into flags, and what was given into frozen options. One way for every command."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from headrace.base.config import (
    Config,
    check_environment,
    check_keys,
    environment,
    flag,
    load,
    nearest,
    parse,
    read_toml,
)
from headrace.base.errors import ConfigError

E = TypeVar("E")

# The commands with options of their own.
COMMAND_TABLES = ("run", "bench", "bench_kernels", "inspect", "profile", "quality", "quantize")


@dataclass(frozen=True)
class NoOptions:
    """For a command that has none of its own."""


@dataclass(frozen=True)
class Given(Generic[E]):
    """What a command was called with, all layers applied."""

    config: Config
    own: E
    positionals: dict[str, Any]


@dataclass(frozen=True)
class Positional:
    name: str
    doc: str
    required: bool = False


@dataclass(frozen=True)
class Command(Generic[E]):
    """A command's shape: which Config fields are its flags (None: all), its own options, its positionals."""

    name: str
    summary: str
    own: type[E]
    positionals: tuple[Positional, ...] = ()
    config_fields: tuple[str, ...] | None = None

    @property
    def table(self) -> str:
        """What its TOML table and its variables are named after."""
        return self.name.replace(" ", "_")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def read(command: Command[E], arguments: Sequence[str]) -> Given[E]:
    """Parses a command line over variables and the TOML file.

    Raises ConfigError naming what is unknown (and the nearest known one) or has a bad value.
    """
    config_fields = [
        spec
        for spec in dataclasses.fields(Config)
        if command.config_fields is None or spec.name in command.config_fields
    ]
    own_fields = list(dataclasses.fields(command.own))  # type: ignore[arg-type]
    parser = _build(command, config_fields, own_fields)
    namespace, unknown = parser.parse_known_args(arguments)
    known_flags = [name for action in parser._actions for name in action.option_strings]
    for word in unknown:
        name = word.split("=")[0]
        kind = "flag" if word.startswith("-") else "argument"
        raise ConfigError(f"unknown {kind} {name}{nearest(name, known_flags)}; see {parser.prog} --help")
    values = vars(namespace)
    positionals = {item.name: values.pop(f"positional_{item.name}") for item in command.positionals}
    toml_path = values.pop("config", None) or environment().get("HEADRACE_CONFIG")
    table = read_toml(toml_path) if toml_path else {}
    _check_table(table, command, own_fields)
    own_flags = {spec.name: values[f"own_{spec.name}"] for spec in own_fields if f"own_{spec.name}" in values}
    config_flags = {spec.name: values[spec.name] for spec in config_fields if spec.name in values}
    for item in command.positionals:
        if item.name == "model" and positionals["model"] is not None:
            config_flags["model"] = positionals["model"]
    config = load(Config, config_flags, environment(), table)
    own = load(command.own, own_flags, environment(), table.get(command.table, {}), command.table)
    _warn_of_unread_variables(own_fields, command.table)
    return Given(config, own, positionals)


def numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    """A list such as 1,16; none for an empty text. Raises ConfigError for what is no whole number from 1 to `most`."""
    try:
        found = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is not a list of whole numbers such as 1,16") from error
    if any(not 1 <= number <= most for number in found):
        raise ConfigError(f"{flag}: {text!r} has a number outside 1 to {most}")
    return found


def _build(
    command: Command[Any], config_fields: Sequence["dataclasses.Field[Any]"], own: Sequence["dataclasses.Field[Any]"]
) -> _Parser:
    parser = _Parser(
        prog=f"headrace {command.name}",
        description=command.summary,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        epilog="Every flag has a HEADRACE_ environment variable and a TOML key of the same name (docs/operations.md).",
    )
    for item in command.positionals:
        many = None if item.required else "?"
        parser.add_argument(
            f"positional_{item.name}", metavar=item.name.upper(), nargs=many, default=None, help=item.doc
        )
    group = parser.add_argument_group(f"{command.name} options") if own else parser
    for spec in own:
        _add(group, spec, f"own_{spec.name}")
    group = parser.add_argument_group("engine and server options") if own else parser
    for spec in config_fields:
        if not (spec.name == "model" and any(item.name == "model" for item in command.positionals)):
            _add(group, spec, spec.name)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options")
    return parser


def _add(group: Any, spec: "dataclasses.Field[Any]", destination: str) -> None:
    default = "" if spec.default in ("", 0) or spec.metadata.get("secret") else f" Default: {spec.default}."
    text = (spec.metadata["doc"] + default).replace("%", "%%")
    if isinstance(spec.default, bool):
        group.add_argument(flag(spec.name), dest=destination, action=argparse.BooleanOptionalAction, help=text)
        return
    choices = spec.metadata.get("choices")
    metavar = "{" + ",".join(map(str, choices)) + "}" if choices else _kind(spec)
    names = [flag(spec.name), *([spec.metadata["short"]] if "short" in spec.metadata else [])]
    group.add_argument(*names, dest=destination, metavar=metavar, help=text)


def _kind(spec: "dataclasses.Field[Any]") -> str:
    """What a value looks like, in one word: a SIZE may be 512M, a COUNT 8k."""
    if spec.metadata.get("size"):
        return "SIZE"
    if spec.metadata.get("count"):
        return "COUNT"
    return {int: "NUMBER", float: "NUMBER", str: "TEXT"}[type(spec.default)]


def _check_table(
    table: Mapping[str, Any], command: Command[Any], own_fields: Sequence["dataclasses.Field[Any]"]
) -> None:
    config_names = [spec.name for spec in dataclasses.fields(Config)]
    check_keys(table, [*config_names, *COMMAND_TABLES], "config file")
    own_table = table.get(command.table, {})
    if not isinstance(own_table, dict):
        raise ConfigError(f"config file: [{command.table}] must be a table")
    check_keys(own_table, [spec.name for spec in own_fields], f"config file, table [{command.table}]")
    for spec in dataclasses.fields(Config):
        if spec.name in table:
            parse(spec, table[spec.name], f"TOML key {spec.name}")


def _warn_of_unread_variables(own_fields: Sequence["dataclasses.Field[Any]"], command: str) -> None:
    known = ["HEADRACE_CONFIG"] + [f"HEADRACE_{spec.name.upper()}" for spec in dataclasses.fields(Config)]
    known += [f"HEADRACE_{command.upper()}_{spec.name.upper()}" for spec in own_fields]
    others = tuple(f"HEADRACE_{table.upper()}_" for table in COMMAND_TABLES if not command.startswith(table))
    watched = {name: value for name, value in environment().items() if not name.startswith(others)}
    for warning in check_environment(watched, known):
        print(f"headrace: warning: {warning}", file=sys.stderr)
