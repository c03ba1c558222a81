"""Chooses the positions in a prompt at which a state is worth storing. Imports no mlx.

These are message ends, image ends, and points where a prompt left a stored path (as in Marconi,
MLSys 2025). In long new text, some are guesses for another question about the same text.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...records import Prompt

GRID = 64
"""Prefill passes start on multiples of this. The result does not change if a pass ends on one."""
WORTH_A_PASS = 64
"""Tokens that a snapshot must save: it needs its own pass, and reading the weights again costs as
much time as some tens to hundreds of tokens."""
WORTH_A_GUESS = 512
"""The same for guesses, of which about one in ten is used."""
GUESSED = (16, 4)
"""A guess is this fraction (1/n) of the new tokens before the end: for a short question after a
long text, and for one after its first pages."""
RECENT = 3
"""Message ends kept per path besides the end of the system prompt."""
INSIDE = 2
"""Further snapshots kept per path: guesses, and branch points of prompts."""


def places(
    prompt: Prompt, done: int = 0, branch: int = 0, *, grid: int = GRID, fits: int | None = None
) -> tuple[int, ...]:
    """Ascending token counts at which to store a state.

    At most 1 + `RECENT` ends, a branch, and the guesses of `GUESSED`. `done`: tokens with which the
    row resumes. `branch`: tokens before the prompt leaves another one. `grid`: positions are
    rounded down to it. `fits`: tokens that the prefix cache can hold; a longer prompt has a state
    there.
    """
    total = len(prompt.tokens)
    stop = total if fits is None else min(fits, total)
    every = [end for end in cuts_of(prompt, done) if end <= stop]
    ends = {*every[:1], *every[1:][-RECENT:]}
    before = max((end for end in ends if end <= branch), default=done)
    at = branch // grid * grid
    if at - before >= WORTH_A_PASS and not _inside_media(prompt, at):
        ends.add(at)
    last = stop // grid * grid
    if stop < total and last - max(ends, default=done) >= WORTH_A_PASS:
        ends |= set() if _inside_media(prompt, last) else {last}
    fresh = 2 * done < total  # a conversation that continues will probably continue again
    guesses = _guesses(prompt, max(done, at), ends, stop) if fresh else set()
    return tuple(sorted(ends | guesses))


def cuts_of(prompt: Prompt, done: int = 0) -> tuple[int, ...]:
    """Image ends, and the message ends that save more than a pass costs, counted from the previous
    state. `done`: tokens with which the row resumes."""
    images = {span.end for span in prompt.spans}
    cuts: list[int] = []
    for end in sorted(ends_of(prompt)):
        far = end - max(cuts, default=done) >= WORTH_A_PASS
        if done < end < len(prompt.tokens) and (far or end in images):
            cuts.append(end)
    return tuple(cuts)


def ends_of(prompt: Prompt) -> set[int]:
    return {span.end for span in prompt.spans} | {*prompt.snapshot_points}


def _guesses(prompt: Prompt, start: int, states: Iterable[int], stop: int) -> set[int]:
    """Positions before the end of the last message, last first, far from any other state."""
    end = min(stop, max(prompt.snapshot_points, default=stop))
    held, found = {start, *states}, set[int]()
    for part in GUESSED:
        at = (end - max(GRID, (end - start) // part)) // GRID * GRID
        before = max((state for state in held if state <= at), default=at)
        near = any(at <= state < at + WORTH_A_PASS for state in held)
        close = any(guess - at < WORTH_A_GUESS for guess in found)
        worth = at - before >= WORTH_A_GUESS and not near and not close
        if worth and not _inside_media(prompt, at):
            found.add(at)
    return found


def _inside_media(prompt: Prompt, at: int) -> bool:
    return any(span.start < at < span.end for span in prompt.spans)
