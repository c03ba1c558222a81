"""Measurements of a model's last load, and the gain of drafts here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..engine.scheduling.admission import Limits
from ..engine.scheduling.chunking import Chunking
from ..engine.scheduling.costs import Costs
from ..engine.speculation.policy import HOPE, Policy
from ..families.estimate import text_fields
from ..serving.measurements import Measured, Measurements, beside_a_prompt, software
from ..serving.weight_files import stored_tensors
from .findings import Finding
from .subject import Subject

DECLARED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Config fields of a head for multi-token prediction."""
HEAD = re.compile(r"(?:^|\.)mtp\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
OUTPUT = re.compile(r"(?:^|\.)lm_head\.")
EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.")
APART = re.compile(r"visual|vision|audio|encoder")
"""In names of tensors that text tokens do not use."""
ACCEPTED = HOPE
"""Share of drafts that the engine expects to accept at first."""
NOT_MEASURED = (
    "how fast it is here is measured when it loads: run `mlx-provider doctor` with this model and "
    "without --quick, or send it a request"
)


@dataclass(frozen=True)
class Head:
    stored: bool
    share: float


def decoding(subject: Subject) -> Iterator[Finding]:
    """How requests share the device, as measured at the last load."""
    if subject.folder is None:
        return
    measured = last_measured(subject)
    if measured is None:
        yield Finding("measured.decoding", "note", NOT_MEASURED)
        return
    probe, settings = measured.probe, subject.settings
    prompts = "in the same passes" if probe.mixes else "in passes of their own"
    summary = (
        "each request decodes in passes of its own"
        if probe.layout == "solo"
        else f"requests decode together (layout {probe.decoding}), prompts are computed {prompts}"
    )
    if probe.noise_floor:
        summary += (
            f"; log-probabilities change by up to {probe.noise_floor:.2g} with the other requests "
            "(model_info.mlx.reproducible: true prevents that, and costs speed)"
        )
    if measured.software != software():
        summary += f"; measured with {measured.software}, and again at the next load"
    yield Finding("measured.decoding", "ok", summary)
    for note in probe.notes:
        yield Finding("measured.notes", "note", note)
    limits = Limits(
        settings.max_rows, settings.max_queue, settings.stall_target, settings.max_chunk, 0
    )
    chunking = Chunking(limits, Costs(measured.curve), grid=1, fixed=None)
    yield Finding("measured.prompts", "ok", beside_a_prompt(chunking))


def head_of(tensors: Mapping[str, int], layers: object) -> Head:
    """Found by names and bytes. `layers`: of the model; a head may be stored as further ones. A
    draft reads the head and the output matrix once more."""
    text = {name: size for name, size in tensors.items() if not APART.search(name)}
    head = {name for name in text if HEAD.search(name) or _number(name) >= _count(layers)}
    rest = {name: size for name, size in text.items() if name not in head}
    output = _total(rest, OUTPUT) or _total(rest, EMBEDDING)
    unread = (
        _total(rest, EMBEDDING) if _total(rest, OUTPUT) else 0
    )  # only one row per token is read
    read = sum(rest.values()) - unread
    guess = sum(text[name] for name in head) + output if head else 0
    return Head(bool(head), min(1.0, guess / max(1, read)))


def head(subject: Subject) -> Iterator[Finding]:
    """Whether the checkpoint has the head of its config."""
    found = head_of_model(subject)
    if found is None:
        return
    text = text_fields(subject.config)
    if found.stored:
        yield Finding("speculation.head", "ok", "the checkpoint has a head for drafts")
    elif any(text.get(name) for name in DECLARED):
        summary = "config.json names a head for drafts, and the weights have none"
        remedy = "take a conversion that keeps it (tensors `mtp.*`), or set model_info.mlx: "
        remedy += "{drafter: model, draft_model: <folder>}"
        yield Finding("speculation.head", "warn", summary, remedy)
    else:
        summary = "the checkpoint has no head for drafts: only text that repeats is drafted"
        yield Finding("speculation.head", "ok", summary)


def gain(subject: Subject) -> Iterator[Finding]:
    found, measured = head_of_model(subject), last_measured(subject)
    if found is None or measured is None:
        return
    if measured.probe.drafts:
        yield Finding("speculation.gain", "ok", gain_text(measured, found))
    else:
        summary = "no drafts: on this device several tokens of a request cannot share a pass"
        yield Finding("speculation.gain", "note", summary)


def gain_text(measured: Measured, head: Head) -> str:
    seconds = measured.curve.seconds
    drafts, times = Policy().expected_gain(
        lambda drafts: seconds(1 + drafts), ACCEPTED, per_draft=head.share * seconds(1)
    )
    which = "drafts of its head" if head.stored else "drafts of text that repeats"
    cost = f"each costs {head.share:.0%} of a pass" if head.stored else "they cost nothing"
    if not drafts:
        return f"{which} do not pay here, even if {ACCEPTED:.0%} are accepted ({cost})"
    return (
        f"{which}, {drafts} to a pass, make a single stream {times:.2f} times as fast if "
        f"{ACCEPTED:.0%} are accepted ({cost}; a pass with them takes "
        f"{seconds(1 + drafts) / seconds(1):.2f} times as long)"
    )


def last_measured(subject: Subject) -> Measured | None:
    """With an unchanged KV cache."""
    if subject.folder is None:
        return None
    kept = Measurements.chosen(subject.settings.measurements, subject.environ).of(subject.folder)
    return next((each for each in reversed(kept) if not each.kind), None)


def head_of_model(subject: Subject) -> Head | None:
    """`None`: the model is not here."""
    if subject.folder is None:
        return None
    layers = text_fields(subject.config).get("num_hidden_layers")
    return head_of(stored_tensors(subject.folder), layers)


def _number(name: str) -> int:
    """Number of a tensor's layer; -1: none."""
    match = LAYER.search(name)
    return int(match[1]) if match else -1


def _count(layers: object) -> float:
    return layers if isinstance(layers, int) and layers > 0 else float("inf")


def _total(tensors: Mapping[str, int], pattern: re.Pattern[str]) -> int:
    return sum(size for name, size in tensors.items() if pattern.search(name))
