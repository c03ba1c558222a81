"""Guessing ahead: whether a checkpoint has a head for it, and what it would gain here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..engine.speculation.policy import HOPE, Policy
from ..families.estimate import text_fields
from ..serving.measurements import Measured, Measurements
from ..serving.weight_files import tensor_names
from .findings import Finding
from .subject import Subject

DECLARED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields by which configs tell of a head for multi-token prediction."""
HEAD = re.compile(r"(?:^|\.)mtp\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
ACCEPTED = HOPE
"""Share of guesses that is assumed to hold: what the engine expects before it has seen any."""
MEASURE = "run `mlx-provider doctor` with this model and without --quick, or send it a request"


def head(subject: Subject) -> Iterator[Finding]:
    """Whether the checkpoint has kept the head that its config declares."""
    if subject.folder is None:
        return
    text = text_fields(subject.config)
    declared = any(text.get(name) for name in DECLARED)
    stored = _stored(tensor_names(subject.folder), text.get("num_hidden_layers"))
    if stored:
        yield Finding("speculation.head", "ok", "the checkpoint has a head that guesses ahead")
    elif declared:
        told = "the config tells of a head that guesses ahead, and the checkpoint has none"
        remedy = "take a conversion that keeps it (tensors `mtp.*`), or set model_info.mlx: "
        remedy += "{drafter: model, draft_model: <folder>}"
        yield Finding("speculation.head", "warn", told, remedy)
    else:
        told = "the checkpoint has no head that guesses ahead; what the text repeats is guessed"
        yield Finding("speculation.head", "ok", told)


def gain(subject: Subject) -> Iterator[Finding]:
    """What guesses would gain on this device, by the costs of passes that were timed at load."""
    if subject.folder is None:
        return
    kept = last_measured(subject)
    if kept is None:
        told = f"what guesses gain here is known once the model was loaded: {MEASURE}"
        yield Finding("speculation.gain", "note", told)
        return
    if not kept.probe.drafts:
        told = "nothing is guessed ahead: on this device several tokens of a row share no pass"
        yield Finding("speculation.gain", "note", told)
        return
    layers = int(text_fields(subject.config).get("num_hidden_layers") or 0)
    yield Finding("speculation.gain", "ok", promised(kept, layers))


def promised(kept: Measured, layers: int) -> str:
    """For people. A guess of the head is taken to cost what one of the model's layers does."""
    each = kept.curve.seconds(1) / max(1, layers)
    drafts, times = Policy().promised(
        lambda drafts: kept.curve.seconds(1 + drafts), ACCEPTED, per_draft=each
    )
    assumed = f"if {ACCEPTED:.0%} of the guesses hold, which is assumed"
    if not drafts:
        return f"guessing ahead does not pay on this device even {assumed}"
    passes = f"a pass of {1 + drafts} tokens takes {_times(kept, drafts):.2f} times that of one"
    gained = f"{drafts} guesses in a pass make a single stream {times:.2f} times as fast"
    return f"{gained} {assumed}; {passes}"


def last_measured(subject: Subject) -> Measured | None:
    """Of the model with a KV cache as it is; `None`: nothing was kept."""
    if subject.folder is None:
        return None
    kept = Measurements.chosen(subject.settings.measurements, subject.environ).of(subject.folder)
    return next((each for each in reversed(kept) if not each.kind), None)


def _times(kept: Measured, drafts: int) -> float:
    return kept.curve.seconds(1 + drafts) / kept.curve.seconds(1)


def _stored(names: frozenset[str], layers: object) -> bool:
    """By name, or as layers beyond those that the config counts."""
    if any(HEAD.search(name) for name in names):
        return True
    found = (LAYER.search(name) for name in names if not _apart(name))
    numbers = [int(match[1]) for match in found if match]
    return isinstance(layers, int) and max(numbers, default=0) >= layers


def _apart(name: str) -> bool:
    """Whether a tensor belongs to no text model, whose layers alone are counted."""
    return any(part in name for part in ("visual", "vision", "audio", "encoder"))
