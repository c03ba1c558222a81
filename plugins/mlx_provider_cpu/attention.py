"""Attention in NumPy, because MLX's CPU build (0.32.4, x86-64) takes some 20 ns per exponential,
NumPy 2 ns. Blocks of queries attend to the keys up to their positions; the heads of a large call
are divided among the cores. In shapes: B rows, H query heads, Hk key heads, G = H / Hk, L queries,
S keys, D values of a query or key, Dv of a value."""

import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_provider.cores import cores
from mlx_provider.records import Part

BLOCK = 1 << 18  # scores of one block: they fit into the cache of a core
QUERIES = 16  # fewest queries of a block: fewer are not worth reading the keys
PACKED = 16
"""`few @ many` is faster row by row, as BLAS then does not pack `many`, if the smaller side of
`many` is at least so many times the number of rows of `few`."""
PARALLEL_SCORES = 1 << 16  # from so many on, the heads are divided among the cores
MIN_SCORES = 1 << 12  # with fewer, waiting for the keys costs more than it saves
Floats = NDArray[np.float32]
Share = tuple[slice, ...]  # slices of rows, key heads, and query heads of each key head


@functools.cache
def limit_numpy_threads() -> None:
    """From now on, NumPy computes each product in the calling thread only. The threads of its BLAS
    and of MLX's BLAS spin while they wait, and would take the cores from each other: a chunk of 20
    ms then sometimes takes 180."""
    from threadpoolctl import ThreadpoolController

    paths = [library.filepath for library in ThreadpoolController().lib_controllers]
    bundled = [path for path in paths if "numpy.libs" in path]
    ThreadpoolController().select(filepath=bundled).limit(limits=1)


def applies(queries: mx.array, parts: Sequence[Part], options: Mapping[str, Any]) -> bool:
    """Whether `attend(queries, parts, **options)` is correct and faster. Not for sinks, quantised
    or half-precision keys. Called for each layer in each pass."""
    (rows, heads, tokens, _), seen = queries.shape, 0
    for part in parts:
        arrays = (queries, part.keys, part.values)
        if not all(isinstance(x, mx.array) and x.dtype == mx.float32 for x in arrays):
            return False
        seen += len(range(rows)[part.rows]) * part.keys.shape[2]
    return heads * tokens * seen >= MIN_SCORES and options.keys() == {"scale"}


def attend(queries: mx.array, parts: Sequence[Part], *, scale: float) -> mx.array:
    """Same as `mx.fast.scaled_dot_product_attention` of each part, evaluated at once. `queries` (B,
    H, L, D) with H a multiple of every Hk; the parts are all of its rows in order. Returns (B, H,
    L, Dv)."""
    limit_numpy_threads()
    inputs = [x for part in parts for x in (part.keys, part.values, part.mask)]
    mx.eval(queries, [x for x in inputs if isinstance(x, mx.array)])
    q = np.asarray(queries) * np.float32(scale)
    out = np.empty((*q.shape[:3], parts[0].values.shape[-1]), dtype=np.float32)
    for part in parts:
        _attend_part(part, part.select(q), part.select(out))
    return mx.array(out)


def _attend_part(part: Part, q: Floats, out: Floats) -> None:
    """Write the result of scaled queries (B, H, L, D) into `out` (B, H, L, Dv)."""
    k, v = np.asarray(part.keys), np.asarray(part.values)
    B, H, L, _ = q.shape
    Hk, S = k.shape[1:3]
    mask = _mask(part.mask, Hk, H) if isinstance(part.mask, mx.array) else None
    causal = isinstance(part.mask, str)
    q, out = (x.reshape(B, Hk, H // Hk, L, -1) for x in (q, out))  # views: an axis is split

    def attend_share(at: Share) -> None:
        own = None if mask is None else mask[_narrow(at, mask.shape)]
        _attend(q[at], k[at[:2]], v[at[:2]], causal, own, out[at])

    on_cores(attend_share, _shares((B, Hk, H // Hk), B * H * L * S))


def _attend(
    q: Floats, k: Floats, v: Floats, causal: bool, mask: NDArray[Any] | None, out: Floats
) -> None:
    """Like `_attend_part`, with queries (B, Hk, G, L, D) and `out` (B, Hk, G, L, Dv)."""
    B, Hk, G, L, D = q.shape
    S = k.shape[2]
    transposed = k.swapaxes(-1, -2)
    count = min(round(B * Hk * G * L * S / BLOCK), L // QUERIES)
    size = -(-L // max(1, count))
    for start in range(0, L, size):
        stop = min(L, start + size)
        seen = S - L + stop if causal else S
        block = q[:, :, :, start:stop].reshape(B, Hk, -1, D)
        scores = _product(block, transposed[..., :seen]).reshape(B, Hk, G, stop - start, seen)
        if mask is not None:
            _apply(mask[..., start:stop, :] if mask.shape[-2] > 1 else mask, scores)
        elif causal:
            _hide_later(scores)
        weights, total = _exponentials(scores.reshape(B, Hk, -1, seen))
        mean = _product(weights, v[:, :, :seen])
        mean /= total
        out[:, :, :, start:stop] = mean.reshape(B, Hk, G, stop - start, -1)


def _product(few: Floats, many: Floats) -> Floats:
    """`few @ many`; row by row if packing `many` is not worth it for so few rows."""
    if few.shape[-2] * PACKED > min(many.shape[-2:]):
        return few @ many
    return (few[..., None, :] @ many[..., None, :, :])[..., 0, :]


def _shares(axes: tuple[int, int, int], scores: int) -> list[Share]:
    """Divide the longest of the axes (B, Hk, G) among the cores, if there are enough scores."""
    everything = (slice(None),) * 3
    if scores < PARALLEL_SCORES:
        return [everything]
    axis = max(range(3), key=lambda i: axes[i])
    count = min(core_count(), axes[axis])
    edges = [axes[axis] * i // count for i in range(count + 1)]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return [tuple(part if i == axis else slice(None) for i in range(3)) for part in parts]


def _mask(mask: mx.array, Hk: int, H: int) -> NDArray[Any]:
    """A view that broadcasts to (B, Hk, H / Hk, L, S)."""
    found = np.asarray(mask)
    found = found.reshape((1,) * (4 - found.ndim) + found.shape)
    rows, heads = found.shape[:2]
    split = (1, 1) if heads == 1 else (Hk, H // Hk)
    return found.reshape(rows, *split, *found.shape[2:])


def _narrow(at: Share, shape: tuple[int, ...]) -> Share:
    """The same share of an array of this shape, in which an axis of length 1 broadcasts."""
    return tuple(s if n > 1 else slice(None) for s, n in zip(at, shape, strict=False))


def _apply(mask: NDArray[Any], scores: Floats) -> None:
    if mask.dtype == np.bool_:
        np.copyto(scores, np.finfo(np.float32).min, where=~mask)
    else:
        scores += mask


def _hide_later(scores: Floats) -> None:
    """A causal mask, where the queries are the last positions of the keys."""
    count = scores.shape[-2]
    scores[..., -count:] += _later(count)


@functools.lru_cache(maxsize=8)
def _later(count: int) -> Floats:
    """To add to the scores of `count` queries with each other. Read-only."""
    hidden = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
    hidden.flags.writeable = False
    return hidden


def _exponentials(scores: Floats) -> tuple[Floats, Floats]:
    """Softmax over the last axis, in place, but not yet divided, and its divisor."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True)


T = TypeVar("T")
core_count = functools.cache(cores)
_placed = threading.local()


def on_cores(work: Callable[[T], None], shares: Sequence[T]) -> None:
    """Call `work` with each share, on a core of its own; with the first one in this thread. Raises
    the first error, after all calls have ended.

    If no core is idle, Linux runs a woken thread on the core of its waker, and the threads of MLX's
    BLAS spin between two products. So each of our threads stays off the core of the thread that
    waits for it; otherwise two cores were no faster than one."""
    first, *others = shares
    if not others:
        work(first)
        return
    here = ctypes.CDLL(None).sched_getcpu() if sys.platform == "linux" else None
    running = [_pool().submit(_run_off_core, here, work, share) for share in others]
    try:
        work(first)
    finally:
        wait(running)
    for future in running:
        future.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, core_count() - 1), thread_name_prefix="core")


@functools.cache
def _process_cores() -> set[int]:
    """The cores of this process, before its threads are placed."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()


def _run_off_core(core: int | None, work: Callable[[T], None], share: T) -> None:
    if core is not None and getattr(_placed, "off", None) != core and len(_process_cores()) > 1:
        _placed.off = core
        with suppress(OSError):  # a system that refuses it may use one core
            os.sched_setaffinity(0, _process_cores() - {core})
    work(share)
