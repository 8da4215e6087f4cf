"""SmolLM2 itself: the same bits alone and among strangers, greedy and seeded, in chunks and on two threads."""

from dataclasses import replace
from pathlib import Path

import pytest
from driver import GREEDY, SEEDED, Driver, Sequence, random_prompt

from headrace.backend.base import BackendSpec
from headrace.backend.cpu import CpuBackend
from headrace.core.request import SamplingParams
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph

OUTPUTS = 6
VOCAB = 49152


def open_driver(path: Path, threads: int) -> Driver:
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint.config, checkpoint)
    spec = BackendSpec(graph.kv_groups, (96,), 32, VOCAB, 512, 32, 32, 2048)
    backend = CpuBackend(graph, checkpoint, spec, threads=threads)
    checkpoint.close()
    return Driver(backend, seed=threads)


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path) -> dict[bool, Sequence]:
    """The answers of one thread, a whole prompt a step, nobody else there; keyed by whether the request is seeded."""
    driver = open_driver(smollm2_gguf, 1)
    answers = {}
    for seeded in (False, True):
        answers[seeded] = driver.sequence(random_prompt(270, VOCAB), 280, SEEDED if seeded else GREEDY)
        driver.finish([answers[seeded]], OUTPUTS)
    return answers


@pytest.mark.parametrize("seeded", [False, True])
def test_among_strangers_in_chunks_on_two_threads(
    smollm2_gguf: Path, alone: dict[bool, Sequence], seeded: bool
) -> None:
    params: SamplingParams = SEEDED if seeded else GREEDY
    driver = open_driver(smollm2_gguf, 2)
    strangers = [driver.sequence(random_prompt(n, VOCAB, seed=n), n + 30, replace(params, seed=n)) for n in (5, 40, 90)]
    driver.finish(strangers, 2, chunk=48)
    request = driver.sequence(random_prompt(270, VOCAB), 280, params)
    while len(request.tokens) < OUTPUTS:
        running = [strangers[2], request, *strangers[:2]]
        driver.step([(s, min(100, s.request.num_tokens - s.computed)) for s in running])
    assert request.status == 0
    assert request.tokens == alone[seeded].tokens
    assert request.rows == alone[seeded].rows


def mapped_bytes(path: Path) -> int:
    """Of a file, what is in this process's memory."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_of_file = line.endswith(str(path))
        elif line.startswith("Rss:") and is_of_file:
            total += int(line.split()[1]) << 10
    return total


def test_what_packing_read_of_the_model_file_is_given_back(smollm2_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"  # other tests hold the file itself
    copy.write_bytes(smollm2_gguf.read_bytes())
    driver = open_driver(copy, 2)
    assert mapped_bytes(copy) < copy.stat().st_size // 100
    driver.finish([driver.sequence([1, 2, 3], 8, GREEDY)], 2)
    assert 0 < mapped_bytes(copy) < copy.stat().st_size // 10  # the rows of the embedding table that were asked for
