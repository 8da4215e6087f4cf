"""`headrace ps`: the servers running on this machine, and how busy they are."""

import asyncio
import time
from collections.abc import Sequence

from headrace.base.config import cache_dir
from headrace.bench.client import LoadError, Target, fetch
from headrace.cli.options import Command, NoOptions, read
from headrace.server.running import RunningServer, running

COMMAND = Command("ps", "List the servers running on this machine.", NoOptions, config_fields=("cache_dir", "api_key"))

_ANSWER_SECONDS = 2.0


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    servers = running(cache_dir(given.config.cache_dir) / "run")
    states = asyncio.run(_states(servers, given.config.api_key))
    print(f"{'PID':>8}  {'UP':>9}  {'STATE':<22} {'URL':<28} MODEL")
    for server, state in zip(servers, states, strict=True):
        up = _duration(time.time() - server.started_at)
        print(f"{server.pid:>8}  {up:>9}  {state:<22} {server.url:<28} {server.model}")
    return 0


async def _states(servers: Sequence[RunningServer], api_key: str) -> list[str]:
    return await asyncio.gather(*(_state(server, api_key) for server in servers))


async def _state(server: RunningServer, api_key: str) -> str:
    target = Target.parse(server.url, api_key)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            status, _ = await fetch(target, "GET", "/readyz")
            if status != 200:
                return "not ready"
            status, body = await fetch(target, "GET", "/metrics")
    except (LoadError, TimeoutError):
        return "does not answer"
    if status != 200:
        return "ready"
    gauges = dict(
        line.rsplit(" ", 1) for line in body.decode().splitlines() if line.startswith("headrace_num_requests_")
    )
    counts = {name.split("{")[0].removeprefix("headrace_num_requests_"): float(value) for name, value in gauges.items()}
    return f"{counts.get('running', 0):.0f} running, {counts.get('waiting', 0):.0f} waiting"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
