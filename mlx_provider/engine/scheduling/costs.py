"""Time of a forward pass: a curve that is measured at load. If later passes take longer or shorter,
the curve is measured anew in them, as passes only to measure would stop streams. No mlx."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Annotated, NamedTuple

from pydantic import Field

log = logging.getLogger(__name__)

EWMA_DECAY = 0.9
"""Weight of the old value at each new measurement."""
SPIKE = 3.0
"""A measurement counts as at most this multiple of the expected one: it may be a disturbance."""
WRONG, ENOUGH = 1.5, 8
"""If a kind of pass is on average this many times slower or faster than measured at load, after so
many passes, its points are measured anew."""
SHAPES = 10_000
"""After so many shapes of chunks, all count as new again, which bounds their memory."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""The limits check values that are read from a file."""
Points = tuple[tuple[int, Seconds], ...]
"""(tokens or rows of a pass, seconds), by ascending tokens or rows."""
Passes = tuple[tuple[int, Annotated[Seconds, Field(gt=0)]], ...]
"""Points of whole passes: corrections multiply, so none may be zero."""


class Load(NamedTuple):
    """What one pass has to do. `keys`: cached tokens of its decoding `rows`; `chunk`: tokens of its
    chunk; `depth`: cached tokens before the chunk."""

    keys: int = 0
    chunk: int = 0
    depth: int = 0
    rows: int = 0


NO_LOAD = Load()
KINDS = {"rows": "decode passes", "chunk": "passes of prompts"}  # as the log names them


@dataclass(frozen=True)
class Curve:
    """Seconds of one pass, measured on this device with this model. A chunk of `tokens` takes
    `seconds(tokens)`, plus `per_key(tokens)` for each cached token that they attend to. Attention
    has separate kernels for few tokens, so it has separate points, `depths`."""

    widths: Annotated[Passes, Field(min_length=1)]
    """Chunks over short caches, by their tokens. The seconds do not decrease."""
    depths: Points = ()
    """Extra seconds per cached token, by the tokens of the chunk. Empty: not measured."""
    rows: Passes = ()
    """Decode passes by their number of rows, without attention to cached tokens (`per_key(1)` of
    each). Empty: they take as long as a chunk of as many tokens."""
    saved: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Seconds by which a chunk in the pass of rows is faster than two passes; negative: slower.
    `None`, without any measurement: as long as one token takes, as if only weights took time."""
    first: Seconds = 0.0
    """Extra seconds of the first chunk with a new pair of (chunk tokens, cached tokens)."""
    drafts: Points = ()
    """Extra seconds of separate operations for the drafts of one row, by their number."""

    def seconds(self, tokens: int) -> float:
        """Of a chunk: linear between two measured widths and beyond the last one."""
        return _interpolate(self.widths, tokens)

    def of_rows(self, rows: int) -> float:
        """Of a decode pass, without attention to cached tokens."""
        return _interpolate(self.points("rows"), rows)

    def points(self, kind: str) -> Points:
        """The points for a kind of passes, one of `KINDS`."""
        return self.rows or self.widths if kind == "rows" else self.widths

    @property
    def mixing(self) -> float:
        """Seconds by which a mixed pass is faster than two passes: at most those of one token."""
        one_token = min(self.seconds(1), self.of_rows(1))
        return one_token if self.saved is None else min(self.saved, one_token)

    def per_key(self, tokens: float) -> float:
        """Seconds per cached token that `tokens` of one row attend to. Linear between two points;
        beyond the last point proportional to the tokens, which is the upper limit."""
        if not self.depths:
            return 0.0
        widest, slope = self.depths[-1]
        return slope * tokens / widest if tokens > widest else _interpolate(self.depths, tokens)

    def with_drafts(self, drafts: int, width: int, rows: int, keys: int) -> float:
        """Seconds that a decode pass takes longer with drafts, spread over its rows, which attend
        to a row's cache together. `width`: its other tokens; `keys`: cached tokens of the rows."""
        per_row = drafts / max(1, rows)
        # what rows take longer than a chunk is time of the host, which drafts do not add
        scale = min(1.0, self.of_rows(width) / self.seconds(width))
        wider = scale * (self.seconds(width + drafts) - self.seconds(width))
        deeper = keys * max(0.0, self.per_key(1 + per_row) - self.per_key(1))
        longer = _interpolate(self.drafts, max(1.0, per_row)) if self.drafts else 0.0
        return wider + deeper + min(drafts, rows) * longer

    def measured_anew(self, kind: str, points: Mapping[int, float], others: float) -> Curve:
        """The curve with other seconds for a kind of passes: those of each point, times the factor
        in `points`, or times `others` for a point that is not there."""

        def longer(old: Points) -> Points:
            return non_decreasing({n: points.get(n, others) * seconds for n, seconds in old})

        # what a mixed pass saves is of both kinds
        saved = None if self.saved is None else self.saved * others**0.5
        if kind == "rows":
            drafts = tuple((n, others * seconds) for n, seconds in self.drafts)
            return replace(self, rows=longer(self.points(kind)), drafts=drafts, saved=saved)
        depths = tuple((n, points.get(n, others) * seconds) for n, seconds in self.depths)
        rows, widths = self.points("rows"), longer(self.widths)
        return replace(self, rows=rows, widths=widths, depths=depths, saved=saved)

    @classmethod
    def through(cls, short: Mapping[int, float], deep: Mapping[int, float], depth: int) -> Curve:
        """The curve through the seconds of ascending widths over short caches, and of some of them
        over a cache of `depth` tokens."""
        depths = ((n, max(0.0, seconds - short[n]) / depth) for n, seconds in deep.items())
        return cls(non_decreasing(short), tuple(depths))


def non_decreasing(seconds: Mapping[int, float]) -> Points:
    """Points in which more tokens never take less time: lower seconds are raised."""
    return tuple(zip(seconds, accumulate(seconds.values(), max), strict=True))


def _interpolate(points: Points, at: float) -> float:
    """Linear between points, constant before the first one. After the last one, the line goes on
    through the last two, or with one point from zero."""
    if at <= points[0][0]:
        return points[0][1]
    i = min(bisect_left(points, (at, 0.0)), len(points) - 1)
    (n, s), (m, t) = points[i - 1] if i else (0, 0.0), points[i]
    return t + (at - m) * (t - s) / (m - n)


UNMEASURED = Curve(((1, 0.01), (2048, 1.0)))
"""Default without measurements: 2,000 tokens per second, at most a hundred passes per second."""


class Costs:
    """Expected seconds of passes: the curve, with corrections by the passes that have run."""

    def __init__(self, curve: Curve = UNMEASURED) -> None:
        self.curve = curve
        self.pace = dict.fromkeys(KINDS, 1.0)
        """Factor on the curve's seconds of rows and of chunks: other load, heat, host work."""
        self._count = dict.fromkeys(KINDS, 0)
        self._anew: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
        """By kind and nearest point of the curve: how many times as long passes took."""
        self._shapes: set[tuple[int, int]] = set()  # (tokens, cached tokens) of chunks that ran

    def pass_of(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        """Expected seconds of a pass: `rows` decoding rows with `keys` cached tokens in all, and a
        chunk after `depth` cached tokens."""
        curve, found = self.curve, 0.0
        if rows:
            found = self.pace["rows"] * (curve.of_rows(rows) + keys * curve.per_key(1))
        if chunk:
            attended = depth * curve.per_key(chunk) if depth else 0.0
            found += self.pace["chunk"] * (curve.seconds(chunk) + attended)
            found += curve.first if (chunk, depth) not in self._shapes else 0.0
        if rows and chunk:
            found -= min(self.pace.values()) * curve.mixing
        return found

    def update(self, expected: float, seconds: float, loads: Sequence[Load] = (NO_LOAD,)) -> None:
        """Passes of these loads took `seconds`; `pass_of` gave `expected`. The paces of rows and of
        chunks change by their parts of the expected seconds."""
        if expected <= 0 or seconds <= 0:
            return
        ratio = min(seconds / expected, SPIKE)
        chunks = [(load.chunk, load.depth) for load in loads if load.chunk]
        part = min(1.0, sum(self.pass_of(0, 0, *chunk) for chunk in chunks) / expected)  # of chunks
        if all(load.chunk and not load.keys for load in loads):
            part = 1.0
        if len(loads) == 1 and bool(loads[0].rows) != bool(loads[0].chunk):
            self._measure("rows" if loads[0].rows else "chunk", loads[0], ratio)
        norm = part**2 + (1 - part) ** 2  # both changes together change the sum by the ratio
        for kind, share in (("rows", 1 - part), ("chunk", part)):
            if share:
                self._count[kind] += 1
                decay = min(EWMA_DECAY, 1 - 1 / self._count[kind])
                self.pace[kind] *= (decay + (1 - decay) * ratio) ** (share / norm)
                self._correct(kind)
        if self.curve.first:
            if len(self._shapes) > SHAPES:
                self._shapes.clear()
            self._shapes.update(chunks)

    def _measure(self, kind: str, load: Load, ratio: float) -> None:
        """A pass of one kind alone took `ratio` times as long as expected."""
        width = load.chunk or load.rows
        nearest = min((n for n, _ in self.curve.points(kind)), key=lambda n: abs(n - width))
        times = ratio * self.pace[kind]
        known = self._anew[kind].get(nearest, times)
        self._anew[kind][nearest] = EWMA_DECAY * known + (1 - EWMA_DECAY) * times

    def _correct(self, kind: str) -> None:
        """Measure the points of a kind anew, if its present pace is far from theirs."""
        pace = self.pace[kind]
        if self._count[kind] < ENOUGH or 1 / WRONG < pace < WRONG:
            return
        self.curve = self.curve.measured_anew(kind, self._anew[kind], pace)
        self.pace[kind], self._count[kind], self._anew[kind] = 1.0, 0, {}
        log.info("%s take %.2g times as long as measured: measured anew", KINDS[kind], pace)


class PassTimer:
    """Measures passes for `Costs`. The next pass is launched before the last one ends, so the time
    between two ends is the time of one pass, or of several that ended together."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._launched: list[tuple[float, Load]] = []  # (expected seconds, load), the oldest first
        self._since = 0.0
        self.token_at = 0.0  # when the decoding rows last got a token; the engine sets it

    def stall_seconds(self, now: float) -> float:
        """Seconds that rows will have waited when the chunks behind their last pass have ended."""
        return now - self.token_at + sum(_behind_rows(self._launched))

    def launch(self, expected: float, now: float, load: Load = NO_LOAD) -> None:
        """A pass goes to the device, behind those that are there."""
        if now - self._since > sum(seconds for seconds, _ in self._launched):
            # unknown end: the engine was idle, another one ran, or an image was embedded
            self._launched.clear()
        if not self._launched:
            self._since = now
        self._launched.append((expected, load))

    def end_rows(self, now: float, *, newer: bool, usual: bool) -> float:
        """The last pass with rows has ended, with all passes before it. `newer`: one more pass was
        launched since, and does not count. Returns what `end` does."""
        older = self._launched[: len(self._launched) - newer]
        return self.end(now, left=newer + len(_behind_rows(older)), usual=usual)

    def end(self, now: float, *, left: int = 0, usual: bool = True) -> float:
        """All passes except the `left` newest have ended. Returns their time, as a multiple of the
        expected time; 0: unknown. `usual`: the costs are updated with these passes."""
        done = len(self._launched) - left
        ended, seconds = self._launched[:done], now - self._since
        expected = sum(pass_seconds for pass_seconds, _ in ended)
        del self._launched[:done]
        self._since = now
        if usual:
            self._costs.update(expected, seconds, [load for _, load in ended])
        return seconds / expected if expected > 0 else 0.0

    def forget(self) -> None:
        """Do not measure the passes on the device: their time will not be that of passes only."""
        self._launched.clear()


def _behind_rows(launched: Sequence[tuple[float, Load]]) -> list[float]:
    """Expected seconds of the passes after the last one with rows."""
    behind = takewhile(lambda launch: not launch[1].keys, reversed(launched))
    return [seconds for seconds, _ in behind]
