"""AsyncEngine against a real engine process over real sockets: what users get, and that nothing stays behind."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_harness import SharedEngine, Watcher, ask, collect, endless, run, running, with_params

from headrace.base.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError
from headrace.core.events import EventKind
from headrace.core.request import FinishReason
from headrace.engine.client import AsyncEngine
from headrace.engine.fake_model import END_OF_TURN, LINE, MAX_POSITION
from headrace.engine.generation import GenerationRequest


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(tmp_path_factory.mktemp("cache"))
    yield engine
    engine.close()


def expected_text(num_prompt_tokens: int, num_tokens: int) -> bytes:
    """What the fake model says greedily: its line by position, and a control token at the end of each."""
    script = [*LINE.encode(), None]
    said = [script[(num_prompt_tokens + i) % len(script)] for i in range(num_tokens)]
    return bytes(byte for byte in said if byte is not None)


def test_streams_tokens_one_by_one_and_counts_them(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        answer = await collect(engine, ask(engine, "Once", max_tokens=200))
        assert answer.text == expected_text(4, 200).decode("utf-8", "replace")
        assert [delta.num_output_tokens for delta in answer.deltas] == list(range(1, 201))
        assert len(answer.token_ids) == 200
        assert (answer.last.finish_reason, answer.last.stop_reason) == (FinishReason.LENGTH, None)
        assert {delta.num_prompt_tokens for delta in answer.deltas} == {4}
        assert all("\ufffd" not in delta.text for delta in answer.deltas[:-1])

    shared.run(main)


def test_a_stop_token_ends_the_turn_and_is_counted_not_shown(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        request = ask(engine, "Once", max_tokens=500, stop_token_ids=engine.default_params().stop_token_ids)
        answer = await collect(engine, replace(request, skip_special_tokens=False))
        assert answer.text == LINE[4:]
        assert answer.token_ids[-1] == END_OF_TURN
        assert answer.last.num_output_tokens == len(LINE.encode()) - 4 + 1
        assert (answer.last.finish_reason, answer.last.stop_reason) == (FinishReason.STOP, END_OF_TURN)

    shared.run(main)


def test_stop_strings_that_span_tokens(shared: SharedEngine) -> None:
    async def check(engine: AsyncEngine, watcher: Watcher, stop: str, include: bool) -> None:
        request = ask(engine, "Once", max_tokens=500, stop=[stop, "never"], include_stop_str_in_output=include)
        answer = await collect(engine, request)
        whole = expected_text(4, 500).decode("utf-8", "replace")
        assert answer.text == whole[: whole.index(stop) + len(stop) * include]
        assert (answer.last.finish_reason, answer.last.stop_reason) == (FinishReason.STOP, stop)
        num_tokens = len(whole[: whole.index(stop) + len(stop)].encode())
        assert answer.last.num_output_tokens == num_tokens == len(answer.token_ids)
        await watcher.until(EventKind.FINISHED, request.request_id)
        finished = watcher.events[-1] if watcher.events[-1].kind is EventKind.FINISHED else watcher.events[-2]
        assert (finished.num_tokens, finished.detail) == (num_tokens, "stop")

    async def main(engine: AsyncEngine) -> None:
        watcher = Watcher(engine)
        for stop in ("wheel", "é", "🌊", " ", "e wheel, é", "y, and the mill turns 🌊"):
            for include in (False, True):
                await check(engine, watcher, stop, include)
        assert (await watcher.until_idle()).kv_blocks_used == 0

    shared.run(main)


def test_a_stop_string_is_noticed_while_nobody_reads(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        watcher = Watcher(engine)
        request = ask(engine, "Once", max_tokens=4000, stop=["wheel"])
        stream = engine.generate(request)
        await watcher.until(EventKind.FINISHED, request.request_id)
        assert "".join([delta.text async for delta in stream]) == LINE[4 : LINE.index("wheel")]

    shared.run(main)


def test_a_failing_subscriber_harms_nobody(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        def broken(events: object) -> None:
            raise RuntimeError("an observer's defect")

        unsubscribe = engine.subscribe(broken)
        assert (await collect(engine, ask(engine))).last.num_output_tokens == 16
        unsubscribe()

    shared.run(main)


def test_min_tokens_hold_a_stop_string_off(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        whole = expected_text(4, 500).decode("utf-8", "replace")
        first, second = whole.index("the"), whole.index("the", whole.index("the") + 1)
        answer = await collect(engine, ask(engine, max_tokens=500, min_tokens=first + 3 + 1, stop=["the"]))
        assert answer.text == whole[:second]

    shared.run(main)


def test_text_held_back_for_a_stop_string_comes_at_the_end(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        whole = expected_text(4, 9).decode()
        answer = await collect(engine, ask(engine, max_tokens=9, stop=[whole[2:] + "!"]))
        assert answer.text == whole
        assert answer.last.finish_reason is FinishReason.LENGTH

    shared.run(main)


def test_choices_differ_and_logprobs_come_with_their_bytes(shared: SharedEngine) -> None:
    async def read(engine: AsyncEngine, request: GenerationRequest) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {choice: [] for choice in range(3)}
        prompt_logprobs = []
        async for delta in engine.generate(request):
            assert [info.token_id for info in delta.logprobs] == delta.token_ids
            for info in delta.logprobs:
                assert info.data == engine.tokenizer.token_bytes(info.token_id)
                assert len(info.top) == 2 and info.top[0].logprob >= info.top[1].logprob
            tokens[delta.choice] += delta.token_ids
            if delta.prompt_logprobs is not None:
                prompt_logprobs.append([info.token_id for info in delta.prompt_logprobs])
        assert prompt_logprobs == [request.prompt_token_ids[1:]] * 3
        return tokens

    async def main(engine: AsyncEngine) -> None:
        request = ask(engine, n=3, max_tokens=64, temperature=1.0, seed=7, logprobs=2, prompt_logprobs=0)
        tokens = await read(engine, request)
        assert len({tuple(ids) for ids in tokens.values()}) == 3
        assert await read(engine, with_params(request)) == tokens
        assert await read(engine, with_params(request, seed=8)) != tokens

    shared.run(main)


def test_aborting_in_every_state_frees_everything(tmp_path: Path) -> None:
    """Waiting behind a full batch, in the middle of a long prompt, in decode, before the first read."""

    async def main() -> None:
        async with running(tmp_path, max_num_seqs=1, max_num_batched_tokens=16) as engine:
            watcher = Watcher(engine)
            unread = engine.generate(endless(engine))
            await unread.aclose()
            await watcher.until_idle()

            decoding = endless(engine)
            stream = engine.generate(decoding)
            await anext(stream)
            waiting = engine.generate(endless(engine))
            await watcher.until(EventKind.QUEUED, at_least=3)
            await waiting.aclose()
            survivor = ask(engine, max_tokens=3)
            survivor_answer = asyncio.ensure_future(collect(engine, survivor))
            await anext(stream)
            await stream.aclose()
            assert (await survivor_answer).last.num_output_tokens == 3

            prefilling = ask(engine, "x" * 4000, max_tokens=1)
            stream = engine.generate(prefilling)
            await watcher.until(EventKind.SCHEDULED, prefilling.request_id)
            assert watcher.count(EventKind.FIRST_TOKEN, prefilling.request_id) == 0
            await stream.aclose()
            gauges = await watcher.until_idle()
            assert (gauges.num_running, gauges.num_waiting, gauges.kv_blocks_used) == (0, 0, 0)
            assert engine.num_live == 0
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(main())


def test_cancelling_or_dropping_the_reader_aborts(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, max_num_seqs=1) as engine:
            watcher = Watcher(engine)
            busy = engine.generate(endless(engine))
            await anext(busy)
            reader = asyncio.ensure_future(collect(engine, endless(engine)))
            await watcher.until(EventKind.QUEUED, at_least=2)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert engine.num_live == 1
            del busy
            gauges = await watcher.until_idle()
            assert (gauges.num_running, gauges.kv_blocks_used, engine.num_live) == (0, 0, 0)

    run(main())


def test_the_queue_is_bounded_and_says_when_to_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, max_num_seqs=2, max_waiting=3) as engine:
            watcher = Watcher(engine)
            requests = [endless(engine) for _ in range(5)]
            streams = [engine.generate(request) for request in requests]
            with pytest.raises(OverloadedError) as refused:
                engine.generate(endless(engine))
            assert refused.value.retry_after >= 1
            assert watcher.events[-1].kind is EventKind.REFUSED
            await streams[0].aclose()
            await watcher.until(EventKind.SCHEDULED, requests[2].request_id)
            streams.append(engine.generate(endless(engine)))
            for stream in streams:
                await stream.aclose()
            assert (await watcher.until_idle()).kv_blocks_used == 0

    run(main())


def test_64_streams_at_once_each_get_their_own_text(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        watcher = Watcher(engine)
        prompts = ["x" * (i + 1) for i in range(64)]
        answers = await asyncio.gather(*(collect(engine, ask(engine, p, max_tokens=40)) for p in prompts))
        for i, answer in enumerate(answers):
            assert bytes(t for t in answer.token_ids if t < 256) == expected_text(i + 1, 40)
        assert max(event.of for event in watcher.events if event.kind is EventKind.STEP) > 32
        assert (await watcher.until_idle()).kv_blocks_used == 0

    shared.run(main)


def test_what_cannot_be_served_is_refused_before_it_is_sent(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        watcher = Watcher(engine)
        assert engine.max_model_len == MAX_POSITION
        with pytest.raises(ContextLengthError, match=r"4096 tokens, but 4100.* 4000 in the prompt and 100"):
            engine.generate(ask(engine, "x" * 4000, max_tokens=100))
        bad = [
            ask(engine, []),
            ask(engine, [engine.vocab_size]),
            ask(engine, [-1]),
            ask(engine, n=0),
            ask(engine, n=1 << 20),
            ask(engine, stop=[""]),
            ask(engine, stop=["a"] * 1000),
            ask(engine, temperature=float("nan")),
            ask(engine, temperature=-1.0),
            ask(engine, top_p=0.0),
            ask(engine, top_k=1 << 31),
            ask(engine, repetition_penalty=1e-9),
            ask(engine, logprobs=1 << 20),
            ask(engine, logit_bias=((engine.vocab_size, 1.0),)),
            ask(engine, seed=1 << 64),
            ask(engine, min_tokens=17),
        ]
        for request in bad:
            with pytest.raises(RequestError):
                engine.generate(request)
        assert {event.kind for event in watcher.events} == {EventKind.REFUSED}
        request = endless(engine)
        stream = engine.generate(request)
        with pytest.raises(RequestError, match="in use"):
            engine.generate(request)
        await stream.aclose()

    shared.run(main)


def test_the_longest_prompt_that_fits_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, kv_cache_memory_bytes=1 << 20, max_num_seqs=4) as engine:
            assert engine.max_model_len == 1024
            answer = await collect(engine, ask(engine, "x" * 1023, max_tokens=1))
            assert answer.last.num_output_tokens == 1

    run(main())


def test_equal_prefixes_are_reused_and_salts_keep_apart(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        cached = []
        for salt in ("", "", "other"):
            answer = await collect(engine, ask(engine, "y" * 100, cache_salt=salt))
            cached.append(answer.last.num_cached_tokens)
        assert cached == [0, 96, 0]

    shared.run(main)


def test_events_have_no_gaps(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, self_test=True) as engine:
            watcher = Watcher(engine)
            await engine.wait_self_test()
            await collect(engine, ask(engine))
            await watcher.until_idle()
            for source, first in (("api", None), ("engine", 0)):
                numbers = [event.sequence for event in watcher.events if event.source == source]
                start = numbers[0] if first is None else first
                assert numbers == list(range(start, start + len(numbers)))

    run(main())


def test_text_goes_through_the_chat_template(shared: SharedEngine) -> None:
    async def main(engine: AsyncEngine) -> None:
        user = [{"role": "user", "content": "hi"}]
        ids = await engine.encode_chat(user)
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        started = [*user, {"role": "assistant", "content": "Well, "}]
        ids = await engine.encode_chat(started, add_generation_prompt=False, continue_final_message=True)
        assert engine.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nWell, ")
        with pytest.raises(RequestError, match="messages"):
            await engine.encode_chat(user, template_kwargs={"messages": []})
        assert await engine.encode("x" * 5000) == [120] * 5000

    shared.run(main)


def test_closing_fails_what_still_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as engine:
            stream = engine.generate(endless(engine))
            await anext(stream)
            await engine.close()
            with pytest.raises(EngineDeadError, match="shutting down"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError):
                engine.generate(ask(engine))

    run(main())


def test_draining_lets_live_requests_finish(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as engine:
            reader = asyncio.ensure_future(collect(engine, ask(engine, max_tokens=100)))
            await asyncio.sleep(0)  # it is sent
            closing = asyncio.ensure_future(engine.close(drain=30))
            await asyncio.sleep(0)
            assert engine.status().state == "draining"
            assert (await reader).last.finish_reason is FinishReason.LENGTH
            await closing

    run(main())
