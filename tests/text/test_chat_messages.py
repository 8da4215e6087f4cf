import pytest

from headrace.base.errors import RequestError
from headrace.text.chat_messages import prepare_messages, takes_parts


def test_text_parts_are_joined_unless_the_template_loops_over_them():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (joined,) = prepare_messages([{"role": "user", "content": parts}], keep_parts=False)
    assert joined == {"role": "user", "content": "one\ntwo"}
    (kept,) = prepare_messages([{"role": "user", "content": parts}], keep_parts=True)
    assert kept["content"] == parts


def test_null_and_missing_content_become_empty_text():
    prepared = prepare_messages([{"role": "assistant", "content": None}, {"role": "assistant"}], keep_parts=False)
    assert [message["content"] for message in prepared] == ["", ""]


def test_arguments_of_tool_calls_are_parsed():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    (message,) = prepare_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], keep_parts=False)
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": [1, "é"]}
    assert call["function"]["arguments"] == '{"x": [1, "é"]}'


@pytest.mark.parametrize("arguments", ["{not json", '"text"', "[" * 100_000, ""])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = prepare_messages([{"role": "assistant", "tool_calls": [call, "odd"]}], keep_parts=False)
    assert message["tool_calls"] == [call, "odd"]


def test_a_part_that_is_not_text_is_refused():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    with pytest.raises(RequestError, match="'image_url'") as caught:
        prepare_messages(messages, keep_parts=True)
    assert caught.value.param == "messages.1.content"


@pytest.mark.parametrize(
    ("template", "loops"),
    [
        ("{% for item in message['content'] %}{{ item['text'] }}{% endfor %}", True),
        ("{%- for part in message.content -%}{{ part.text }}{%- endfor -%}", True),
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", False),
        ("{% for message in messages %}{{ message.content | trim }}{% endfor %}", False),
    ],
)
def test_templates_that_loop_over_parts_are_recognised(template, loops):
    assert takes_parts(template) is loops
