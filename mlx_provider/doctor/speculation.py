"""Speculation: whether a checkpoint has a draft head, and its gain on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..engine.speculation.odds import HOPE
from ..engine.speculation.policy import Policy
from ..families.estimate import text_fields
from ..serving.measurements import Measured, Measurements
from ..serving.weight_files import stored_tensors
from .findings import Finding
from .subject import Subject

DECLARED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields by which configs tell of a head for multi-token prediction."""
HEAD = re.compile(r"(?:^|\.)mtp\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
OUTPUT = re.compile(r"(?:^|\.)lm_head\.")
EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.")
APART = re.compile(r"visual|vision|audio|encoder")
"""In names of tensors that no token of text passes through."""
ACCEPTED = HOPE
"""Share of guesses that is assumed to hold: what the engine expects before it has seen any."""
MEASURE = "run `mlx-provider doctor` with this model and without --quick, or send it a request"


@dataclass(frozen=True)
class Head:
    """The tensors of a draft head."""

    stored: bool
    share: float
    """Of the bytes that a token passes through: those that one guess reads."""


def head_of(tensors: Mapping[str, int], layers: object) -> Head:
    """By names and bytes. `layers`: of the model; a head may be stored as additional ones.

    A guess reads the head and the output matrix once more.
    """
    text = {name: size for name, size in tensors.items() if not APART.search(name)}
    head = {name for name in text if HEAD.search(name) or _number(name) >= _count(layers)}
    rest = {name: size for name, size in text.items() if name not in head}
    output = _total(rest, OUTPUT) or _total(rest, EMBEDDING)
    unread = _total(rest, EMBEDDING) if _total(rest, OUTPUT) else 0  # a row of it for each token
    read = sum(rest.values()) - unread
    guess = sum(text[name] for name in head) + output if head else 0
    return Head(bool(head), min(1.0, guess / max(1, read)))


def head(subject: Subject) -> Iterator[Finding]:
    """Whether the checkpoint has the head that its config declares."""
    found = head_of_model(subject)
    if found is None:
        return
    text = text_fields(subject.config)
    if found.stored:
        yield Finding("speculation.head", "ok", "the checkpoint has a head that guesses ahead")
    elif any(text.get(name) for name in DECLARED):
        summary = "the config tells of a head that guesses ahead, and the checkpoint has none"
        remedy = "take a conversion that keeps it (tensors `mtp.*`), or set model_info.mlx: "
        remedy += "{drafter: model, draft_model: <folder>}"
        yield Finding("speculation.head", "warn", summary, remedy)
    else:
        summary = "the checkpoint has no head that guesses ahead; what the text repeats is guessed"
        yield Finding("speculation.head", "ok", summary)


def gain(subject: Subject) -> Iterator[Finding]:
    """The gain of drafts on this device, by the costs of passes that were timed at load."""
    found = head_of_model(subject)
    if found is None:
        return
    kept = last_measured(subject)
    if kept is None:
        summary = f"what guesses gain here is known once the model was loaded: {MEASURE}"
        yield Finding("speculation.gain", "note", summary)
    elif not kept.probe.drafts:
        summary = "nothing is guessed ahead: on this device several tokens of a row share no pass"
        yield Finding("speculation.gain", "note", summary)
    else:
        yield Finding("speculation.gain", "ok", gain_text(kept, found))


def gain_text(kept: Measured, head: Head) -> str:
    """For people. The cost of a guess follows from the bytes that it reads."""
    seconds = kept.curve.seconds
    drafts, times = Policy().expected_gain(
        lambda drafts: seconds(1 + drafts), ACCEPTED, per_draft=head.share * seconds(1)
    )
    who = "the head's guesses" if head.stored else "guesses of what the text repeats"
    assumed = f"if {ACCEPTED:.0%} of them hold, which is assumed"
    cost = f"one takes {head.share:.0%} of a plain pass" if head.stored else "they cost nothing"
    if not drafts:
        return f"{who} do not pay on this device even {assumed} ({cost})"
    longer = seconds(1 + drafts) / seconds(1)
    gained = f"{who} make a single stream {times:.2f} times as fast, {drafts} to a pass"
    passes = f"a pass of {1 + drafts} tokens takes {longer:.2f} times that of one"
    return f"{gained}, {assumed} ({cost}, {passes})"


def last_measured(subject: Subject) -> Measured | None:
    """Of the model with an unchanged KV cache; `None`: nothing was kept."""
    if subject.folder is None:
        return None
    kept = Measurements.chosen(subject.settings.measurements, subject.environ).of(subject.folder)
    return next((each for each in reversed(kept) if not each.kind), None)


def head_of_model(subject: Subject) -> Head | None:
    """The head by the model's files; `None`: the model is not here."""
    if subject.folder is None:
        return None
    layers = text_fields(subject.config).get("num_hidden_layers")
    return head_of(stored_tensors(subject.folder), layers)


def _number(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1: none."""
    match = LAYER.search(name)
    return int(match[1]) if match else -1


def _count(layers: object) -> float:
    return layers if isinstance(layers, int) and layers > 0 else float("inf")


def _total(tensors: Mapping[str, int], pattern: re.Pattern[str]) -> int:
    return sum(size for name, size in tensors.items() if pattern.search(name))
