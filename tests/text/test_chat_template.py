"""Rendering as Hugging Face templates expect it, and whatever a template does, a live server after it."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import templates

from headrace.base.errors import ConfigError, RequestError, RequestFailedError
from headrace.text.chat_template import ChatTemplate, RenderLimits, template_from_option

USER = [{"role": "user", "content": "Hi"}]
TALK = [*USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
TIGHT = RenderLimits(memory_bytes=256 << 20, cpu_seconds=0, output_chars=10_000)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def template_of():
    made = []

    def make(source, variables=NAMES, limits=TIGHT):
        made.append(ChatTemplate(source, variables, limits))
        return made[-1]

    yield make
    for template in made:
        template.close()


def worker_pid(template):
    return template._worker._process.pid


def wait_for_end(pid):
    """Returns when the process has ended; the caller fails by its own time limit otherwise."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(60_000)


def test_chatml(template_of):
    template = template_of(templates.CHATML)
    start = "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert template.render_sync(USER) == start + "<|im_start|>assistant\n"
    assert template.render_sync(USER, add_generation_prompt=False) == start


def test_llama3_with_tools_date_and_tool_calls(template_of):
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    call = {"function": {"name": "f", "arguments": '{"q": "ü<"}'}}
    text = template_of(templates.LLAMA3).render_sync(
        [
            {"role": "system", "content": " Be brief. "},
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        tools=tools,
        date_string="01 Jan 2030",
    )
    assert text.startswith("<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 01 Jan 2030\n")
    assert '"description": "<é> & \'x\'"' in text  # nothing escaped for HTML, four spaces of indent
    assert '\n    "type": "function"' in text
    assert "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>" in text
    assert '{"name": "f", "parameters": {"q": "ü<"}}<|eot_id|>' in text
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_llama3_gets_the_local_date(template_of):
    before = datetime.now()
    text = template_of(templates.LLAMA3).render_sync(USER)
    dates = {moment.strftime("%d %b %Y") for moment in (before, datetime.now())}
    assert any(f"Today Date: {date}\n" in text for date in dates)


def test_gemma_takes_parts_and_raises_its_own_errors(template_of):
    template = template_of(templates.GEMMA, {"bos_token": "<bos>"})
    parts = [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}]
    assert template.render_sync(parts) == "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    assert template.render_sync(TALK, add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n"
    )
    with pytest.raises(RequestError, match="Conversation roles must alternate") as caught:
        template.render_sync([USER[0], USER[0]])
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="System role not supported"):
        template.render_sync([{"role": "system", "content": "x"}])


def test_mistral_uses_loop_controls_and_generation_marks(template_of):
    template = template_of(templates.MISTRAL)
    assert template.render_sync(TALK) == "<s>[INST] Hi [/INST] Hello</s>[INST] Bye [/INST]"
    assert template.render_sync([*TALK[:2], {"role": "tool", "content": "x"}]) == "<s>[INST] Hi [/INST] Hello</s>"


def test_null_content_is_empty_text(template_of):
    assert "None" not in template_of(templates.CHATML).render_sync([{"role": "assistant", "content": None}])


def test_further_variables_cannot_replace_the_named_ones(template_of):
    template = template_of("{{ bos_token }}{{ mood }}{{ messages | length }}")
    assert template.render_sync(USER, mood="!", bos_token="x") == "<s>!1"


def test_async_renders_share_the_worker(template_of):
    template = template_of("{{ messages[0].content }}")

    async def many():
        return await asyncio.gather(*(template.render([{"role": "user", "content": str(i)}]) for i in range(50)))

    assert asyncio.run(many()) == [str(i) for i in range(50)]


def test_start_compiles_ahead_and_the_worker_stays(template_of):
    template = template_of(templates.CHATML)
    template.start()
    template.render_sync(USER)
    pid = worker_pid(template)
    template.render_sync(TALK)
    assert worker_pid(template) == pid


def test_large_messages_pass_through_the_pipes(template_of):
    template = template_of("{{ messages[0].content }}", limits=RenderLimits())
    text = "é漢🦙x" * 300_000
    assert template.render_sync([{"role": "user", "content": text}]) == text


def test_a_model_without_a_template_says_what_to_do(template_of):
    template = template_of(None)
    template.start()
    with pytest.raises(RequestError, match="--chat-template") as caught:
        template.render_sync(USER)
    assert (caught.value.status, caught.value.code) == (400, "no_chat_template")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{% set n = 10**9 %}{{ 7**n**n }}", "CPU time|memory|large"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 10000 characters"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deeply"),
        ("{{ [].__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe|undefined"),
        ("{{ '{0.__class__.__init__}'.format(messages) | upper }}{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ messages[0]['content'].nothing.more }}", "nothing"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% if %}", "."),
        ("{{ raise_exception('the words of the template') }}", "^the chat template failed: the words of the template$"),
    ],
)
def test_a_hostile_or_broken_template_fails_alone(template_of, source, message):
    template = template_of("{{ messages[0].content }}" + source)
    with pytest.raises(RequestError, match=message) as caught:
        template.render_sync(USER)
    assert caught.value.status == 400
    # The same template object serves on: its worker survived or is replaced.
    template._template = "{{ messages[0].content }}"
    assert template.render_sync(USER) == "Hi"


def test_a_stuck_worker_is_killed_after_the_wall_time(template_of):
    template = template_of("{{ 1 }}", limits=RenderLimits(wall_seconds=0.5))
    with contextlib.suppress(RequestError):  # on a busy machine the start alone may take longer
        template.render_sync(USER)
    template._worker._running()
    pid = worker_pid(template)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"longer than 0\.5 s"):
        template.render_sync(USER)
    wait_for_end(pid)


def test_a_worker_that_dies_between_renders_is_replaced(template_of):
    template = template_of("{{ messages[0].content }}")
    template.render_sync(USER)
    first = worker_pid(template)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert template.render_sync(USER) == "Hi"
    assert worker_pid(template) != first


def test_a_worker_that_dies_under_a_render_is_the_servers_failure(template_of, monkeypatch):
    template = template_of("{{ messages[0].content }}")
    template.render_sync(USER)
    monkeypatch.setattr(template._worker, "_running", lambda process=template._worker._process: process)
    os.kill(worker_pid(template), signal.SIGKILL)
    with pytest.raises(RequestFailedError, match="ended"):
        template.render_sync(USER)
    monkeypatch.undo()
    assert template.render_sync(USER) == "Hi"


def test_messages_that_are_no_json_are_refused(template_of):
    nested = value = []
    for _ in range(100_000):
        value.append([])
        value = value[0]
    with pytest.raises(RequestError, match="cannot take these messages"):
        template_of("x").render_sync([{"role": "user", "content": "x", "extra": nested}])
    with pytest.raises(RequestError, match="cannot take these messages"):
        template_of("x").render_sync([{"role": "user", "content": "x", "extra": 2**70}])


def test_the_worker_sees_no_secret_and_ignores_ctrl_c(template_of, monkeypatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "secret-key")
    template = template_of("{{ messages[0].content }}")
    template.render_sync(USER)
    assert b"secret-key" not in Path(f"/proc/{worker_pid(template)}/environ").read_bytes()
    os.kill(worker_pid(template), signal.SIGINT)
    os.kill(worker_pid(template), signal.SIGTERM)
    assert template.render_sync(USER) == "Hi"


def test_the_worker_ends_with_close(template_of):
    template = template_of("x")
    template.render_sync(USER)
    pid = worker_pid(template)
    template.close()
    wait_for_end(pid)


def test_close_fails_what_is_under_way_and_what_comes_later(template_of):
    template = template_of("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")

    async def close_under_renders():
        template.start()
        renders = [asyncio.ensure_future(template.render(USER)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, template.close)
        return await asyncio.gather(*renders, return_exceptions=True)

    for error in asyncio.run(close_under_renders()):
        assert isinstance(error, RequestFailedError)
        assert "shutting down" in str(error)
    with pytest.raises(RequestFailedError, match="shutting down"):
        template.render_sync(USER)


def test_the_worker_ends_when_its_parent_is_killed():
    program = (
        "import sys\n"
        "from headrace.text.chat_template import ChatTemplate\n"
        "template = ChatTemplate('x')\n"
        "template.render_sync([{'role': 'user', 'content': 'x'}])\n"
        "print(template._worker._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env={"PYTHONPATH": root}
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for_end(pid)


def test_the_option_names_a_file_or_is_the_template(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ 1 }}é", encoding="utf-8")
    assert template_from_option(str(file)) == "{{ 1 }}é"
    assert template_from_option("{% if 1 %}x{% endif %}") == "{% if 1 %}x{% endif %}"
    with pytest.raises(ConfigError, match="neither a Jinja template nor a readable file"):
        template_from_option(str(tmp_path / "missing.jinja"))
