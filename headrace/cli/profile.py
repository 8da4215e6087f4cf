"""`headrace profile MODEL`: where the time of a step goes, against what this machine can do at most."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.base.clock import SystemClock
from headrace.base.config import option
from headrace.base.errors import ConfigError, HeadraceError
from headrace.cli.options import Command, Positional, numbers, read
from headrace.cli.progress import ProgressLine


@dataclass(frozen=True)
class ProfileOptions:
    batch: str = option("1,16", "Streams of each decode scenario, separated by commas; empty: none.")
    context: int = option(192, "Tokens that each decoding stream has behind it.", count=True, minimum=1)
    tokens: str = option("512", "Prompt tokens of each prefill scenario, each prompt in one step.")
    repeats: int = option(20, "Steps that a median is taken of.", count=True, minimum=1)
    output: str = option("", "Write the picture, a flame graph, to this SVG file.")


COMMAND = Command(
    "profile",
    "Show where the time of a step goes, record by record, against limits of this machine measured alongside.",
    ProfileOptions,
    (Positional("model", "catalog name, path or hub id; smollm2-135m when absent"),),
    ("model", "cache_dir", "isa", "threads", "block_size", "kv_cache_memory_bytes"),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    from headrace.backend.cpu import CpuBackend
    from headrace.bench.flame import flame_svg
    from headrace.bench.profile import Profiler, Scenario, describe_limits, measure_limits, run_all, table
    from headrace.engine.launch import launch
    from headrace.engine.model_path import find_model

    own, clock = given.own, SystemClock()
    streams, prompts = numbers("--batch", own.batch, 4096), numbers("--tokens", own.tokens, 65536)
    config = replace(
        given.config,
        enable_prefix_caching=False,
        max_num_seqs=max([1, *streams]),
        max_num_batched_tokens=max(given.config.max_num_batched_tokens, *streams, *prompts),
    )
    scenarios = [Scenario(True, count, own.context) for count in streams]
    scenarios += [Scenario(False, 1, tokens) for tokens in prompts]
    with ProgressLine() as line:

        def report(what: str, fraction: float) -> None:
            line.report(what, round(fraction * 100), 100)

        engine = launch(config, find_model(config, report), 0, clock, report).engine
        backend = engine.backend
        if not isinstance(backend, CpuBackend):
            raise ConfigError("profile: only the CPU backend has a tape")
        limits = measure_limits(backend.threads, backend.isa)
        profiler = Profiler(engine.scheduler, backend, clock, limits)
        profiles = run_all(profiler, scenarios, own.repeats, report)
    title = describe_limits(limits, backend.threads, backend.isa)
    print(title)
    for profile in profiles:
        print("\n" + "\n".join(table(profile, limits)))
    if own.output:
        _write(Path(own.output), flame_svg(profiles, limits, f"{config.model}; {title}"))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise HeadraceError(f"--output {path}: {error.strerror or error}; the table is above") from error
