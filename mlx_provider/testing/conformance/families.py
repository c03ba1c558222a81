"""Model families: description, errors, and a row by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...engine.execution.solo_rows import spread
from ...errors import MLXProviderError
from ...isolation import Isolation
from ...records import LoadOptions, Prompt
from ..tiny.models import start
from .check import Check, NotApplicable, demand, same
from .company import cancellation, company, faults, images, layouts, prefix_reuse, reproducible
from .prompts import LONG, QUESTION, ask, picture, seen
from .specimens import Specimen


def description(of: Specimen) -> None:
    info, prompt = of.model.info, ask(of, QUESTION)
    wanted = "float32" if of.exact else "low"
    same(info.precision, wanted, f"info.precision of weights in {of.kept_in}")
    demand(info.context_length > 0, "info.context_length is no number of tokens")
    demand(info.weights_bytes > 0, "info.weights_bytes is no number of bytes")
    odd = [t for t in info.stop_tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"stop tokens {odd} are beyond the vocabulary of {info.vocab_size}")
    vocab = start(of.model, Prompt(of.tokens(3, 0))).logits.shape
    same(tuple(vocab), (info.vocab_size,), "the shape of logits, where info.vocab_size is told")
    demand(len(prompt.tokens) > 0, "a prompt of its template has no tokens")
    odd = [t for t in prompt.tokens if not 0 <= t < info.vocab_size]
    demand(not odd, f"tokens {odd[:9]} of a prompt are beyond the vocabulary")
    points = list(prompt.snapshot_points)
    demand(points == sorted(points), f"snapshot_points {points} do not ascend")
    demand(
        all(0 < p <= len(prompt.tokens) for p in points), f"snapshot_points {points} lie outside"
    )
    text = "The weather in Paris: 22 degrees, ça va."
    tokenizer = of.model.tokenizer
    same(
        tokenizer.decode(tokenizer.encode(text, special=False)), text, "text read back from tokens"
    )
    if not of.exact:
        other = of.checkpoint.specimen("float32").model.info.fingerprint
        demand(info.fingerprint != other, "info.fingerprint is the same for other weights")


def control_tokens(of: Specimen) -> None:
    """A user's text that looks like a control token is spelt in letters."""
    special = {
        token.content: number
        for number, token in of.model.tokenizer.fast.get_added_tokens_decoder().items()
        if token.special
    }
    if not special:
        raise NotApplicable("its tokenizer has no control tokens")
    plain = list(ask(of, "x").tokens)
    for text, number in special.items():
        found = list(ask(of, f"x {text} y").tokens)
        summary = f"a user who types {text!r} writes the control token {number}"
        demand(found.count(number) <= plain.count(number), summary)


def bad_input(of: Specimen) -> None:
    _typed(
        "loading a folder without weights",
        lambda: of.family.load(_without_weights(of), LoadOptions()),
        must=True,
    )
    prepare = of.model.prepare
    user = {"role": "user", "content": "a"}
    for turns in (
        [user, user],
        [{"role": "assistant", "content": "b"}, user],
        [user, {"role": "assistant", "content": "b"}],
        [user, {"role": "system", "content": "c"}, user],
        [user, {"role": "tool", "content": "22", "tool_call_id": "x"}],
        [{"role": "system", "content": "c"}],
    ):
        _typed(
            f"messages {turns}",
            lambda turns=turns: prepare(turns, tools=[], media=[], variables={}),  # type: ignore[misc]
        )
    if "image" not in of.model.info.media:
        _typed(
            "an image for a model that cannot see",
            lambda: prepare([seen("x")], tools=[], media=[picture(1)], variables={}),
            must=True,
        )


def _without_weights(of: Specimen) -> Any:
    folder = of.checkpoint.new_folder()
    for path in of.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _typed(what: str, run_it: Callable[[], object], *, must: bool = False) -> None:
    """A raised error is one of ours; `must`: one is raised."""
    with Isolation() as trying:
        run_it()
    if trying.fault is None:
        demand(not must, f"{what} raises nothing")
        return
    summary = f"{what} raises no error of mlx_provider.errors: {trying.fault.summary}"
    demand(isinstance(trying.fault.error, MLXProviderError), summary)


def chunked_prefill(of: Specimen) -> None:
    prompt = Prompt(of.tokens(LONG, 3))
    whole = start(of.model, prompt).logits
    for size in (1, 7, 32):
        _near(of, whole, start(of.model, prompt, chunk=size).logits, f"in chunks of {size}")


def one_by_one(of: Specimen) -> None:
    tokens, begun = of.tokens(LONG, 4), LONG - 8
    whole = start(of.model, Prompt(tokens)).logits
    row = start(of.model, Prompt(tokens[:begun]))
    logits = row.logits
    for at in range(begun, LONG):
        ids, positions = (mx.array([each], dtype=mx.int32) for each in (tokens[at], at))
        logits = of.model.decode(ids, row.cache, positions)[0]
        mx.eval(logits)
    _near(of, whole, logits, "decoded one by one")


def _near(of: Specimen, expected: mx.array, found: mx.array, how: str) -> None:
    apart = spread(expected, found)
    summary = f"{how}, log-probabilities differ by {apart:.3g} from those of the prompt at once"
    demand(apart <= of.bound, f"{summary}, where rounding explains {of.bound:.3g}")


CHECKS: tuple[Check[Specimen], ...] = (
    Check("description", "Its `info` and its prompts are what the core relies on.", description),
    Check(
        "chunked prefill", "A prompt gives the same logits in chunks of any size.", chunked_prefill
    ),
    Check("one by one", "Decoded tokens give the same logits as those of a prompt.", one_by_one),
    Check("layouts", "Rows decode together in a layout that it offers.", layouts),
    Check(
        "company",
        "A request gets the tokens that it gets alone, whoever joins, leaves, is cancelled or "
        "fails beside it; in float32 the same ones, else any as likely.",
        company,
    ),
    Check(
        "prefix reuse",
        "What a prompt shares with one before it is found, and gives the same answer.",
        prefix_reuse,
    ),
    Check("images", "Images are told apart by their content, and reused by it.", images),
    Check(
        "reproducible",
        "In fixed passes, a request gives the same bits alone, in company and from the prefix "
        "cache.",
        reproducible,
    ),
)

ONCE: tuple[Check[Specimen], ...] = (
    Check(
        "cancellation",
        "A cancelled request ends, touches nobody, and nothing of its rows is kept.",
        cancellation,
    ),
    Check(
        "faults",
        "A pass that fails, in its middle or at its end, touches no other request.",
        faults,
    ),
    Check(
        "control tokens",
        "No text of a user becomes a control token.",
        control_tokens,
    ),
    Check("bad input", "What is wrong with an input is told by an error of ours.", bad_input),
)
