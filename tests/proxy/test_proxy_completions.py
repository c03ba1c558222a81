"""`/v1/completions` through the proxy: several prompts, echo, log-probabilities."""

import json

from .conftest import refused

ONCE = "Once upon a time"


def told(reply, *, stream):
    """Text of each choice by its index."""
    texts = {}
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.text or "")
    return texts


def test_each_streamed_completion_chunk_has_a_text(engine, raw):
    body = {"model": "scripted", "prompt": ["one two", "x"], "stream": True}
    lines = raw.post("/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    assert all(isinstance(choice["text"], str) for choice in choices)


def test_invalid_completion_prompts_are_refused_with_the_reason(engine, raw):
    sent = {"model": "scripted", "prompt": "x"}
    for more, words in (
        ({"prompt": ["x", "toolong"]}, "prompt[1]: prompt is too long"),
        ({"prompt": ["x"] * 129}, "129 prompts with n=1 make more than 128 choices"),
        ({"prompt": ["x"] * 2, "n": "128"}, "must be a whole number"),
        ({"prompt": ["x", []]}, "prompt[1] must be a text or a list of token ids, and not empty"),
        ({"logprobs": "x" * 99}, "x...x"),
        ({"prompt": []}, "prompt must be a text, a list of token ids, or a list of these"),
        ({"suffix": "end"}, "fill-in-the-middle"),
        ({"best_of": 3}, "best_of=3 is not supported"),
    ):
        reply = raw.post("/v1/completions", json={**sent, **more})
        refused(reply, words)
    # the first prompt of two: it may have ended by itself before it is cancelled
    engine.wait_for(lambda seen: len({*seen["cancelled"], *seen["finished"]}) == 1)


def test_several_prompts_of_the_demo_model_get_the_text_of_each_alone(client, own_engine):
    """Each prompt of several gets what it gets alone, as text and as tokens; echo shows both."""

    def ask(prompt, **more):
        return client.completions.create(
            model="demo", prompt=prompt, max_tokens=6, temperature=0, **more
        )

    alone = [ask(ONCE).choices[0].text, ask("The capital").choices[0].text]
    both = ask([ONCE, "The capital"])
    assert [choice.text for choice in both.choices] == alone
    assert both.usage.completion_tokens == 12
    echoed = told(ask([ONCE, [40, 41]], echo=True, stream=True), stream=True)
    assert echoed[0] == ONCE + alone[0]
    assert echoed[1].startswith(ask([40, 41], echo=True, n=2).choices[1].text[:2])
    scored = ask(ONCE, logprobs=2).choices[0]
    assert "".join(scored.logprobs.tokens) == scored.text == alone[0]
    assert [len(top) for top in scored.logprobs.top_logprobs] == [2] * 6
    streamed = [c.choices[0].logprobs for c in ask(ONCE, logprobs=2, stream=True)]
    pieces = [piece for piece in streamed if piece is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for piece in pieces for value in getattr(piece, name)]
        assert joined == getattr(scored.logprobs, name)
    whole = ask([ONCE, [40, 41]], echo=True, logprobs=1, stream=False).choices
    assert "".join(whole[0].logprobs.tokens).endswith(whole[0].text)
    for choice in whole:
        assert choice.logprobs.token_logprobs[0] is None
        assert all(-50 < value < 1e-5 for value in choice.logprobs.token_logprobs[1:])
