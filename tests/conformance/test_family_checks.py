"""Each check of a family finds the family that breaks its promise, and names the promise."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tiny import build

HEAD = """
from dataclasses import replace
from mlx_provider import ModelFamily, PrefillChunk, Prompt, hookimpl

mlx_provider_api = 1

@hookimpl
def mlx_model_families():
    yield ModelFamily("toy", lambda config: 0, load)

def load(folder, options):
    from mlx_provider.families.text import load_text
    return Toy(load_text(folder, options))

class Base:
    def __init__(self, inner):
        self.inner = inner
        self.count = self.first = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def nudged(self, logits, by):
        import mlx.core as mx
        return logits + by * (mx.arange(logits.shape[-1]) % 7 == 3)

"""
GOOD = "class Toy(Base): ..."
ROWS_SEE_EACH_OTHER = """
class Toy(Base):
    def decode(self, tokens, cache, positions, logits_at=None):
        logits = self.inner.decode(tokens, cache, positions, logits_at)
        return logits + logits.mean(0, keepdims=True) if len(logits) > 1 else logits
"""
REMEMBERS = """
class Toy(Base):
    def prefill(self, chunk):
        self.count += 1
        return self.nudged(self.inner.prefill(chunk), self.count)
"""
FORGETS = """
class Toy(Base):
    def prefill(self, chunk):
        if chunk.start == 0:
            self.first = len(chunk.prompt.tokens)
        return self.nudged(self.inner.prefill(chunk), self.first / 100)
"""
CHUNKS = """
class Toy(Base):
    def prefill(self, chunk):
        logits = self.inner.prefill(chunk)
        return self.nudged(logits, 2.0) if chunk.start else logits
"""
DECODES = """
class Toy(Base):
    def decode(self, tokens, cache, positions, logits_at=None):
        return self.nudged(self.inner.decode(tokens, cache, positions, logits_at), 2.0)
"""
UNTYPED = """
class Toy(Base):
    def prepare(self, messages, *, tools, media, variables):
        assert not media
        return self.inner.prepare(messages, tools=tools, media=media, variables=variables)
"""
CONTROL = """
class Toy(Base):
    def prepare(self, messages, *, tools, media, variables):
        prompt = self.inner.prepare(messages, tools=tools, media=media, variables=variables)
        return replace(prompt, tokens=self.inner.tokenizer.fast.encode(prompt.text).ids)
"""
WRONG_INFO = """
class Toy(Base):
    @property
    def info(self):
        return replace(self.inner.info, vocab_size=self.inner.info.vocab_size + 1)
"""
TOYS = {
    "good": (GOOD, set()),
    "rows see each other": (ROWS_SEE_EACH_OTHER, {"layouts"}),
    "remembers": (REMEMBERS, {"company", "chunked prefill"}),
    "forgets what is not in the cache": (FORGETS, {"prefix reuse"}),
    "chunks": (CHUNKS, {"chunked prefill"}),
    "decodes": (DECODES, {"one by one"}),
    "untyped": (UNTYPED, {"bad input"}),
    "control": (CONTROL, {"control tokens"}),
    "wrong info": (WRONG_INFO, {"description"}),
}
TINY = {"tiny": partial(build, family="llama")}
Failures = Callable[..., dict[str, str]]
QUICK = ("rows see each other", "forgets what is not in the cache")
"""The others are left to `tox -e conformance`."""


@pytest.mark.parametrize(
    "toy",
    [pytest.param(toy, marks=() if toy in QUICK else pytest.mark.conformance) for toy in TOYS],
)
def test_the_check_of_each_broken_promise_of_a_family_fails(
    install_plugin: Callable[..., str], failures: Failures, toy: str
) -> None:
    source, broken = TOYS[toy]
    only = tuple(f"tiny {check}" for check in broken) or ("tiny",)
    found = failures(install_plugin("toyfamily", HEAD + source), TINY, only)
    assert set(found) == {f"{check} [tiny]" for check in broken}, found


def test_two_images_of_a_key_fail(install_plugin: Callable[..., str], failures: Failures) -> None:
    source = HEAD.replace(
        "from mlx_provider.families.text import load_text\n    return Toy(load_text(",
        "import mlx_provider_qwen3_vl\n    return Toy(mlx_provider_qwen3_vl.load(",
    )
    one_key = """
class Toy(Base):
    def prepare(self, messages, *, tools, media, variables):
        prompt = self.inner.prepare(messages, tools=tools, media=media, variables=variables)
        return replace(prompt, spans=[replace(s, content_hash="image") for s in prompt.spans])
"""
    tiny: dict[str, Any] = {"tiny": partial(build, family="qwen3_vl")}
    only = ("tiny images",)
    found = failures(install_plugin("seer", source + one_key), tiny, only)
    assert set(found) == {"images [tiny]"}
    assert "one is answered for the other" in found["images [tiny]"]


def test_without_a_checkpoint_the_family_check_fails_with_the_hook_to_define(
    install_plugin: Callable[..., str], failures: Failures
) -> None:
    found = failures(install_plugin("toyfamily", HEAD + GOOD), only=("checkpoint",))
    assert "pytest_mlx_conformance_models" in found["checkpoint"]
