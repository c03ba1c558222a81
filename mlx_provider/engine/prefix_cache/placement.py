"""Where along a prompt a state is worth keeping. Imports no mlx.

At message ends, at image ends, where a prompt was seen to leave a stored path (as in Marconi,
MLSys 2025), and, as a guess, inside what is long and new: the next prompt may ask something else
about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...records import Prompt

GRID = 64
"""Passes of prefill start on its multiples, counted from the prompt's beginning: what is computed
is the same where a pass ends on one of them."""
WORTH_A_PASS = 64
"""Tokens that a snapshot must spare beyond the state before it, to be worth a pass of its own:
reading the weights once more costs as much time as some tens to hundreds of tokens."""
WORTH_A_GUESS = 512
"""The same where nobody is known to resume there: one guess in some ten is of use."""
GUESSED = (16, 4)
"""A guess stands so far from the end as this part of what is new: a short question behind a long
text, and one behind its first pages."""
RECENT = 3
"""Message ends kept per path besides the first, which is the end of the system prompt."""
INSIDE = 2
"""Snapshots kept per path besides those: guesses, and where prompts branched."""


def places(
    prompt: Prompt, done: int = 0, branch: int = 0, *, grid: int = GRID, fits: int | None = None
) -> tuple[int, ...]:
    """Ascending token counts at which to keep a state.

    At most 1 + `RECENT` ends, a branch, and as many guesses as `GUESSED` has parts. `done`: tokens
    with which the row resumes; `branch`: those after which the prompt leaves another one, more than
    `done` where a state is missing; `grid`: the state is kept at a multiple of it, at most those;
    `fits`: tokens that the prefix cache can hold, so that a longer prompt has a state there.
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
    fresh = 2 * done < total  # a conversation that goes on will again
    guesses = _guesses(prompt, max(done, at), ends, stop) if fresh else set()
    return tuple(sorted(ends | guesses))


def cuts_of(prompt: Prompt, done: int = 0) -> tuple[int, ...]:
    """Message ends, and image ends for another question.

    Image ends always are worth keeping; message ends only if they spare more than a pass costs,
    counted from the last state there is. `done`: tokens with which the row resumes.
    """
    images = {span.end for span in prompt.spans}
    cuts: list[int] = []
    for end in sorted(ends_of(prompt)):
        far = end - max(cuts, default=done) >= WORTH_A_PASS
        if done < end < len(prompt.tokens) and (far or end in images):
            cuts.append(end)
    return tuple(cuts)


def ends_of(prompt: Prompt) -> set[int]:
    """Token counts at the ends of messages and of images."""
    return {span.end for span in prompt.spans} | {*prompt.snapshot_points}


def _guesses(prompt: Prompt, start: int, states: Iterable[int], stop: int) -> set[int]:
    """Places between `start` and the last message's end, the last first, far from any other."""
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
