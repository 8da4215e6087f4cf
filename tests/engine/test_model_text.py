"""The text side of a model folder: sampling defaults, ids that end a turn, conversations that are continued."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config import Config
from headrace.base.errors import RequestError
from headrace.core.request import SamplingParams
from headrace.engine.model_text import ModelText, declared_sampling, sampling_defaults


def test_defaults_come_from_the_folder_and_every_end_token_stops(folder: Path) -> None:
    text = ModelText.load(Config(), folder)
    assert text.defaults == SamplingParams(temperature=0.3, top_k=7, stop_token_ids=(5, 6, 256))
    text.close()
    neutral = ModelText.load(Config(generation_config="none"), folder)
    assert neutral.defaults == SamplingParams(stop_token_ids=(5, 6, 256))
    neutral.close()


def test_nonsense_in_a_generation_config_is_passed_over() -> None:
    nonsense = {"temperature": "hot", "top_p": 7, "top_k": 1 << 31, "min_p": None, "repetition_penalty": -1, "x": 1}
    assert sampling_defaults(nonsense) == SamplingParams()
    assert sampling_defaults({"temperature": 0, "top_p": 1}) == SamplingParams(temperature=0.0, top_p=1.0)


def test_conversations(folder: Path) -> None:
    text = ModelText.load(Config(), folder)

    async def encode(messages: list[dict[str, Any]], **options: Any) -> str:
        return text.tokenizer.decode(await text.encode_chat(messages, **options))

    async def main() -> None:
        started = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "Well, "}]
        assert await encode(started) == "[user] hi\n[assistant] Well,\n"
        open_end = {"add_generation_prompt": False, "continue_final_message": True}
        assert await encode(started, **open_end) == "[user] hi\n[assistant] Well, "
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert await encode(parts, **open_end) == "[user] a\nb"
        for bad in ([], [{"role": "user"}], [{"role": "user", "content": ""}, {"role": "assistant", "content": []}]):
            with pytest.raises(RequestError, match="last message with text"):
                await encode(bad, **open_end)
        with pytest.raises(RequestError, match="exclude each other"):
            await encode(started, continue_final_message=True)

    asyncio.run(main())
    assert text.tokenizer.decode(text.encode_chat_sync([{"role": "user", "content": "x"}], {})) == "[user] x\n"
    text.close()


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it(folder: Path) -> None:
    text = ModelText.load(Config(chat_template="{{ messages[0]['content'] }}{% if false %}{% endif %}"), folder)
    two = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RequestError, match="cannot continue"):
        asyncio.run(text.encode_chat(two, add_generation_prompt=False, continue_final_message=True))
    text.close()


def test_recommended_sampling_comes_from_the_closest_source() -> None:
    file = {"generation_config": {"temperature": 0.7}, "general.sampling.temp": 0.5}
    assert declared_sampling("smollm2-135m", file) == {"temperature": 0.7}
    assert declared_sampling("smollm2-135m", {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}) == {
        "temperature": 0.5,
        "top_k": 20,
    }
    assert declared_sampling("smollm2-135m", {}) == {"temperature": 0.2, "top_p": 0.9}
    assert declared_sampling("./some.gguf", {}) == {}
