"""The engine process is killed while it answers: clients are told, the server says so, and it comes back as it was."""

import json
import os
import signal

import httpx
import openai
import pytest
from asking import GREEDY, MODEL, chat, complete, eventually, gauges
from openai import OpenAI
from server_process import ServerProcess

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2400, "temperature": 0, "stream": True}


def test_a_killed_engine_is_told_and_comes_back_with_the_same_answers(
    server: ServerProcess, client: OpenAI, http: httpx.Client
) -> None:
    before = chat(client, **GREEDY).choices[0].message.content
    killed = server.engine_pid
    with (
        http.stream("POST", "/v1/completions", json={**LONG, "ignore_eos": True}) as wire,
        client.completions.create(**LONG, extra_body={"ignore_eos": True}) as stream,
    ):
        lines, chunks = wire.iter_lines(), iter(stream)
        next(lines)
        next(chunks)
        os.kill(killed, signal.SIGKILL)
        *_, last = (line for line in lines if line)  # ends: the server closes the stream
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(chunks)
    error = json.loads(last.removeprefix("data: "))["error"]  # and no [DONE] after it
    assert (error["type"], error["code"]) == ("server_error", "engine_died")
    refused = http.get("/readyz")
    assert refused.status_code == 503 and refused.json()["status"] == "restarting"
    with pytest.raises(openai.InternalServerError, match="restarting"):
        complete(client, "Hello")
    eventually(lambda: http.get("/readyz").status_code == 200)
    assert server.engine_pid != killed
    assert not any(gauges(http).values())
    assert chat(client, **GREEDY).choices[0].message.content == before
