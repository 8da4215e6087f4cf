"""The same request gives the same answer through scheduler, KV manager and native kernels, whatever happens to it.

Compared are token ids and, to the bit, logprobs and alternatives. Models: SmolLM2 itself, every small checkpoint of
the goldens (full, windowed and mixed KV groups), and random ones that know longer contexts. What a test means to
provoke (a full batch, a prefix hit, a preemption, a fork), it asserts to have happened.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from driver import random_prompt
from engine_loop import BLOCK, Answer, EngineLoop
from tiny_model import CONFIG, GEMMA, TinyCheckpoint

from headrace.core.events import EventKind
from headrace.core.request import SamplingParams
from headrace.model.checkpoint import Checkpoint, open_checkpoint
from headrace.model.config import ModelConfig

TINY = Path(__file__).parents[1] / "data" / "tiny"
FOLDERS = sorted(folder.name for folder in TINY.iterdir() if folder.is_dir())
OUTPUTS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, logprobs=5)
SEEDED = SamplingParams(
    temperature=1.0,
    top_p=0.95,
    min_p=0.01,
    seed=7,
    repetition_penalty=1.1,
    frequency_penalty=0.4,
    max_tokens=OUTPUTS,
    logprobs=5,
)
PROMPT_LENGTH = 244  # with the output, contexts on both sides of 255; all that the small checkpoints know is 256


class Subject:
    """A model, and the answers that one thread gives when nobody else is there."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.vocab_size = checkpoint.config.vocab_size
        self._alone: dict[tuple[SamplingParams, int], Answer] = {}

    def prompt(self, length: int = PROMPT_LENGTH) -> list[int]:
        return random_prompt(length, self.vocab_size)

    def loop(self, **sizes: int) -> EngineLoop:
        return EngineLoop(self.checkpoint, **sizes)

    def answer(self, params: SamplingParams, length: int = PROMPT_LENGTH, **sizes: int) -> Answer:
        loop = self.loop(**sizes)
        loop.add("it", self.prompt(length), params)
        loop.finish()
        assert len(loop.answer("it")) == params.max_tokens
        return loop.answer("it")

    def alone(self, params: SamplingParams, length: int = PROMPT_LENGTH) -> Answer:
        if (params, length) not in self._alone:
            self._alone[params, length] = self.answer(params, length, blocks=200)
        return self._alone[params, length]


@pytest.fixture(params=[pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    given: SamplingParams = request.param
    return given


@pytest.fixture(params=["SmolLM2-135M", *FOLDERS], scope="module")
def subject(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[Subject]:
    path = TINY / request.param if request.param in FOLDERS else smollm2_gguf
    with closing(open_checkpoint(path)) as checkpoint:
        yield Subject(checkpoint)


def stranger(index: int, vocab_size: int) -> tuple[list[int], SamplingParams]:
    """Requests of all lengths and kinds."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_k=20, seed=index),
        SamplingParams(temperature=0.7, presence_penalty=1.0, logit_bias=((3, 5.0),), seed=index),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
    ]
    params = replace(kinds[index % 4], max_tokens=26 + index % 7, logprobs=index % 3)
    return random_prompt(5 + 7 * index % 90, vocab_size, seed=index), params


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_chunks_and_threads(subject: Subject, params: SamplingParams, budget: int) -> None:
    assert subject.answer(params, threads=2, budget=budget, seats=16) == subject.alone(params)


def test_in_a_batch_of_32(subject: Subject, params: SamplingParams) -> None:
    """Comes while 20 run, and 11 more come while it runs: its prompt shares steps with decoding and other prompts."""
    loop = subject.loop(threads=2, budget=150, blocks=300)
    for index in range(20):
        loop.add(f"stranger {index}", *stranger(index, subject.vocab_size))
    for _ in range(4):
        loop.step()
    loop.add("it", subject.prompt(), params)
    for index in range(20, 31):
        loop.step()
        loop.add(f"stranger {index}", *stranger(index, subject.vocab_size))
    loop.finish()
    assert loop.widest_step == 32
    assert loop.answer("it") == subject.alone(params)


def test_after_a_prefix_hit(subject: Subject, params: SamplingParams) -> None:
    """First on what another prompt has left, then on what it left itself; the other ran in other chunks."""
    loop = subject.loop(threads=2, budget=100)
    prompt = subject.prompt()
    loop.add("other", [*prompt[:200], 1, 2, 3], replace(params, seed=99))
    loop.finish()
    for name, reused in (("it", 200 // BLOCK * BLOCK), ("again", (PROMPT_LENGTH - 1) // BLOCK * BLOCK)):
        [request] = loop.add(name, prompt, params)
        loop.finish()
        assert request.num_cached_tokens == reused
        assert loop.answer(name) == subject.alone(params)


def test_after_preemption_in_a_tiny_pool(subject: Subject, params: SamplingParams) -> None:
    """Three blocks for two sequences that grow to need more: the later one is forgotten and computed again."""
    params = replace(params, max_tokens=45)
    loop = subject.loop(threads=2, budget=64, blocks=3)
    loop.add("first", random_prompt(30, subject.vocab_size, seed=1), replace(params, seed=1))
    [request] = loop.add("it", subject.prompt(27), params)
    loop.finish()
    assert request.num_preemptions >= 1
    assert loop.num_events(EventKind.PREEMPTED, "it") == loop.num_events(EventKind.RESUMED, "it") >= 1
    assert loop.answer("it") == subject.alone(params, 27)


def test_with_choices_beside_it(subject: Subject) -> None:
    """Choices draw from KV that they share, copied where one writes. Each is what it is when it is the only one."""
    loop = subject.loop(threads=2, budget=64)
    requests = loop.add("it", subject.prompt(), SEEDED, choices=(0, 1, 2))
    loop.finish()
    assert [request.num_cached_tokens for request in requests[1:]] == [PROMPT_LENGTH - 1] * 2
    assert loop.answer("it", 0) == subject.alone(SEEDED)
    for choice in (1, 2):
        other = subject.loop()
        other.add("it", subject.prompt(), SEEDED, choices=(choice,))
        other.finish()
        assert loop.answer("it", choice) == other.answer("it", choice) != subject.alone(SEEDED)


@pytest.mark.parametrize("length", [255, 256, 257])
@pytest.mark.parametrize("config", [pytest.param(CONFIG, id="llama"), pytest.param(GEMMA, id="gemma")])
def test_prompts_that_end_at_the_edge_of_a_partition(config: ModelConfig, length: int, params: SamplingParams) -> None:
    subject = Subject(TinyCheckpoint(config, "Q4_1"))
    for budget in (16, 100):
        assert subject.answer(params, length, threads=2, budget=budget, seats=16) == subject.alone(params, length)


@pytest.mark.parametrize("length", [2047, 2048, 2049, 6000])
@pytest.mark.parametrize("config", [pytest.param(CONFIG, id="llama"), pytest.param(GEMMA, id="gemma")])
def test_long_contexts(config: ModelConfig, length: int) -> None:
    """In odd chunks beside another request, then again from the prefix index."""
    subject = Subject(TinyCheckpoint(replace(config, max_position=8192), "Q8_0"))
    loop = subject.loop(threads=2, budget=300, blocks=400)
    loop.add("stranger", random_prompt(700, config.vocab_size, seed=5), replace(GREEDY, max_tokens=30))
    loop.step()
    [first] = loop.add("it", subject.prompt(length), SEEDED)
    loop.finish()
    [second] = loop.add("again", subject.prompt(length), SEEDED)
    loop.finish()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert loop.answer("it") == loop.answer("again") == subject.alone(SEEDED, length)
