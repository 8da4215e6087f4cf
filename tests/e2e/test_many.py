"""Many clients at once, and clients that leave: every answer is its own, and nothing stays behind."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from asking import MODEL, complete, complete_stream, eventually, gauges
from openai import OpenAI

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2400, "temperature": 0}
ENDLESS = {"ignore_eos": True}


def is_idle(http: httpx.Client) -> bool:
    return not any(gauges(http).values())


def test_64_streams_at_once_each_say_what_they_say_alone(client: OpenAI) -> None:
    """Every other one is greedy, the others seeded."""
    asked = [(f"In chapter {number} the hero", {"temperature": number % 2, "seed": number}) for number in range(64)]
    alone = [complete(client, prompt, max_tokens=6, **how).choices[0].text for prompt, how in asked]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda one: complete_stream(client, one[0], max_tokens=6, **one[1]), asked))
    assert together == alone
    assert len(set(alone)) > 24


def test_a_client_that_closes_its_stream_gives_everything_back(client: OpenAI, http: httpx.Client) -> None:
    streams = [client.completions.create(**LONG, stream=True, extra_body=ENDLESS) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    assert gauges(http)["headrace_num_requests_running"] == 3
    assert gauges(http)["headrace_kv_cache_usage_perc"] > 0
    for stream in streams:
        stream.close()
    eventually(lambda: is_idle(http))


def test_a_client_that_hangs_up_before_its_whole_answer_does_too(http: httpx.Client) -> None:
    request = http.build_request("POST", "/v1/completions", json=LONG | ENDLESS)
    with socket.create_connection((str(request.url.host), int(request.url.port or 0))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(request.content)}\r\n\r\n"
        connection.sendall(head.encode() + request.content)
        eventually(lambda: gauges(http)["headrace_num_requests_running"] == 1)
    eventually(lambda: is_idle(http))
