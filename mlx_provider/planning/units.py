"""Numbers with units, as people write them: `128gb`, `546GB/s`, `30us`."""

from __future__ import annotations

import re

from ..errors import BadRequest

_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_BYTES = {"mb": 10**6, "gb": 10**9, "tb": 10**12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def memory(text: str) -> int | None:
    """Bytes of memory as it is sold, in powers of two; `None`: no such size."""
    found = _read(text, r"(g|t)i?b", {"g": 2.0**30, "t": 2.0**40})
    return None if found is None else int(found)


def rate(text: str) -> float | None:
    """Bytes a second, in powers of ten; `None`: no such rate."""
    return _read(text, r"([mgt]b)/s", _BYTES)


def products(text: str) -> float | None:
    """Floating-point operations a second."""
    return _read(text, r"(tflops?)", {"tflops": 1e12, "tflop": 1e12})


def seconds(text: str) -> float | None:
    """A time."""
    return _read(text, r"([uµm]?s)", _SECONDS)


def positive(value: float | None, text: str, form: str, param: str) -> float:
    """`value`, or a `BadRequest` that names what cannot be read and how it is written."""
    if value is None or not 0 < value < 1e18:
        raise BadRequest(f"{text!r} is no {form}", param=param)
    return value


def _read(text: str, unit: str, units: dict[str, float] | dict[str, int]) -> float | None:
    found = re.fullmatch(_NUMBER + unit, text.strip().lower())
    return None if found is None else float(found[1]) * units[found[2]]
