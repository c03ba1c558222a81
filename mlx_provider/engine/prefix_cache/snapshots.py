"""Chooses where in a prompt snapshots are stored: the states of layers that cannot be cut at any
token. As in Marconi (MLSys 2025), also where prompts have left a stored path. Imports no mlx."""

from ...records import Prompt
from .tree import Node

RECENT = 3
"""Message ends kept per path besides the end of the system prompt."""
FORKS = 2
"""Further snapshots kept per path, where prompts have differed."""
NEAR = 16
"""This many tokens are cheaper to compute again than to store with a state."""
GRID = 64
"""Positions in a message are multiples of this: passes may end there without another result."""
WORTH_A_PASS = 64
"""Tokens that a snapshot must save: it needs its own pass, and reading the weights again costs as
much time as some tens to hundreds of tokens."""
WORTH_A_GUESS, GUESSED = 512, 16
"""A new message of at least 512 tokens also has a snapshot 1/16 of its length, at least `GRID`
tokens, before its end: the next prompt may ask another question about the same text."""


def choose_snapshots(
    prompt: Prompt, done: int = 0, branch: int = 0, *, grid: int = GRID, storable: int | None = None
) -> tuple[int, ...]:
    """Ascending token counts at which to store a state: at most 1 + `RECENT` ends of messages or
    images, `branch`, a guess shortly before the end of a long message, and `storable`.

    `done`: tokens with which the row resumes. `branch`: tokens before the prompt leaves a stored
    one, 0 if it leaves none. `grid`: all but the ends are rounded down to a multiple of it.
    `storable`: tokens that the prefix cache can hold of a longer prompt; `None`: all."""
    total = len(prompt.tokens)
    stop = total if storable is None else min(storable, total)
    ends = [end for end in cuts_of(prompt, done) if end <= stop]
    chosen = {*ends[:1], *ends[1:][-RECENT:]}
    last_end = min(stop, max(prompt.snapshot_points, default=stop))
    new = last_end - max(done, branch, *(at for at in chosen if at < last_end))
    is_fresh = 2 * done < total  # a conversation that continues will probably continue again
    guess = last_end - max(GRID, new // GUESSED) if is_fresh and new >= WORTH_A_GUESS else 0
    for point in (branch, guess, stop if stop < total else 0):
        before = max((at for at in chosen if at <= point), default=done)
        at = point // grid * grid
        is_inside = any(span.start < at < span.end for span in prompt.spans)
        if at - before >= WORTH_A_PASS and not is_inside:
            chosen.add(at)
    return tuple(sorted(chosen))


def cuts_of(prompt: Prompt, done: int = 0) -> tuple[int, ...]:
    """Ascending ends of images, and of those messages that end at least `WORTH_A_PASS` tokens after
    the previous cut. `done`: tokens with which the row resumes, the cut before the first one."""
    images = {span.end for span in prompt.spans}
    cuts: list[int] = []
    for end in sorted({*images, *prompt.snapshot_points}):
        is_far = end - max(cuts, default=done) >= WORTH_A_PASS
        if done < end < len(prompt.tokens) and (is_far or end in images):
            cuts.append(end)
    return tuple(cuts)


def prune(leaf: Node) -> None:
    """Remove all snapshots of the path to `leaf` but the first, the last `RECENT`, and the nearest
    ones before the last `FORKS` points where prompts have differed."""
    holders = [node for node in leaf.path() if node.snapshot is not None]
    ends, forks = list[Node](), dict[Node, None]()
    for node in leaf.path():
        # once the path goes on, the end of a prompt saves almost nothing after its last message
        is_far = not ends or node.stop - ends[-1].stop >= NEAR or node is holders[-1]
        if node.snapshot is not None and is_far:
            ends.append(node)
        if ends and sum(not child.generated for child in node.children.values()) > 1:
            forks[ends[-1]] = None
    kept = {*ends[:1], *ends[1:][-RECENT:], *list(forks)[-FORKS:]}
    for node in holders:
        if node not in kept:
            node.set_payload(node.segment, None)
