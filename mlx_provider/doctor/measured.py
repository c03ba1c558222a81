"""Stored measurements of a model from an earlier load."""

from __future__ import annotations

from collections.abc import Iterator

from ..engine.scheduling.admission import Limits
from ..engine.scheduling.chunking import Chunking
from ..engine.scheduling.costs import Costs
from ..serving.decoding_text import batching, beside_a_prompt
from ..serving.measurements import software
from .findings import Finding
from .speculation import MEASURE, last_measured
from .subject import Subject


def decoding(subject: Subject) -> Iterator[Finding]:
    """How rows decode together, and how much that changes their last bits."""
    if subject.folder is None:
        return
    kept = last_measured(subject)
    if kept is None:
        summary = f"nothing is measured of it on this machine yet: {MEASURE}"
        yield Finding("measured.decoding", "note", summary)
        return
    found = kept.probe
    summary = batching(found.decoding, found.mixes, found.noise_floor)
    if kept.software != software():
        summary += f" (with {kept.software}: it is measured again at the next load)"
    yield Finding("measured.decoding", "ok", summary)
    for note in found.notes:
        yield Finding("measured.notes", "note", note)
    settings = subject.settings
    limits = Limits(
        settings.max_rows, settings.max_queue, settings.stall_target, settings.max_chunk, 0
    )
    chunking = Chunking(limits, Costs(kept.curve), grid=1, fixed=None)
    yield Finding("measured.prompts", "ok", beside_a_prompt(chunking))
    if found.noise_floor:
        summary = (
            "answers may depend on company within that bound: model_info.mlx.reproducible: true "
        )
        summary += "makes them the same in any, at the price that the engine then tells"
        yield Finding("measured.reproducible", "note", summary)
