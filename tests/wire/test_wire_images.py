"""Images over each API of an engine, by the official SDKs: the demo model says what it sees."""

from typing import Any

import openai
import pytest

from mlx_provider.demo import PICTURE, SEEN, red_circle

pytestmark = pytest.mark.sweep  # it loads a model
MODEL: Any = "demo"
IMAGE = red_circle()
URL = {"type": "input_image", "image_url": IMAGE}
BASE64 = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
BLOCK = {"type": "image", "source": BASE64}
TEXT = {"type": "text", "text": SEEN}


def by_chat(client: openai.OpenAI) -> tuple[str | None, int]:
    parts: Any = [{"type": "image_url", "image_url": {"url": IMAGE}}, TEXT]
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=40
    )
    return reply.choices[0].message.content, reply.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_a_response_gives_the_text_of_chat(client: openai.OpenAI, stream: bool) -> None:
    parts: Any = [URL, {"type": "input_text", "text": SEEN}]
    fields: Any = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 40}
    fields |= {"model": MODEL, "temperature": 0}
    if stream:
        with client.responses.stream(**fields) as events:
            reply = events.until_done().get_final_response()
    else:
        reply = client.responses.create(**fields)
    assert PICTURE in reply.output_text
    assert (reply.output_text, reply.usage.input_tokens) == by_chat(client)


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_messages_gives_the_text_of_chat(
    client: openai.OpenAI, claude: Any, stream: bool
) -> None:
    fields: Any = {"messages": [{"role": "user", "content": [BLOCK, TEXT]}], "max_tokens": 40}
    fields |= {"model": MODEL, "extra_body": {"temperature": 0}}
    if stream:
        with claude.messages.stream(**fields) as events:
            reply = events.get_final_message()
    else:
        reply = claude.messages.create(**fields)
    (said,) = reply.content
    assert said.type == "text"
    assert PICTURE in said.text
    used = reply.usage
    counts = (used.input_tokens, used.cache_read_input_tokens, used.cache_creation_input_tokens)
    assert (said.text, sum(count or 0 for count in counts)) == by_chat(client)


def test_images_in_results_are_seen(client: openai.OpenAI, claude: Any) -> None:
    """An agent reads an image file: the prompt is the same by both APIs."""
    question = {"role": "user", "content": SEEN}
    reads = {"id": "c1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [BLOCK]}
    turns: Any = [
        question,
        {"role": "assistant", "content": [{"type": "tool_use", **reads}]},
        {"role": "user", "content": [result]},
    ]
    message = claude.messages.create(
        model=MODEL, messages=turns, max_tokens=8, extra_body={"temperature": 0}
    )
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [URL]}
    items: Any = [question, call, output]
    response = client.responses.create(model=MODEL, input=items, max_output_tokens=8, temperature=0)
    cached = response.usage.input_tokens_details.cached_tokens
    assert cached == response.usage.input_tokens - 1
    assert "".join(b.text for b in message.content if b.type == "text") == response.output_text
