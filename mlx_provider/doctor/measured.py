"""What was measured of a model at its load, and is kept for the next one."""

from __future__ import annotations

from collections.abc import Iterator

from ..serving.decoding_text import batching
from ..serving.measurements import software
from .findings import Finding
from .speculation import MEASURE, last_measured
from .subject import Subject


def decoding(subject: Subject) -> Iterator[Finding]:
    """How rows decode together, and how far company moves their last bits."""
    if subject.folder is None:
        return
    kept = last_measured(subject)
    if kept is None:
        told = f"nothing is measured of it on this machine yet: {MEASURE}"
        yield Finding("measured.decoding", "note", told)
        return
    found = kept.probe
    told = batching(found.layout, found.mixes, found.noise_floor)
    if kept.software != software():
        told += f" (with {kept.software}: it is measured again at the next load)"
    yield Finding("measured.decoding", "ok", told)
    for note in found.notes:
        yield Finding("measured.notes", "note", note)
    if found.noise_floor:
        told = "answers may depend on company within that bound: model_info.mlx.reproducible: true "
        told += "makes them the same in any, at the price that the engine then tells"
        yield Finding("measured.reproducible", "note", told)
