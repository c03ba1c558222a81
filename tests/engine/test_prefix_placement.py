"""Where snapshots are placed, and how many of them a path holds."""

import pytest

from agent_traffic import SimRequest, SyntheticModel, serve
from integrity import check_integrity
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.snapshots import FORKS, GRID, RECENT, choose_snapshots
from mlx_provider.engine.prefix_cache.tree import CacheKey
from mlx_provider.records import MediaSpan, Prompt

KEY = CacheKey("simulated")
UNLIMITED = 2**60
DOCUMENT = list(range(1, 4001))
TAIL = [7, 7, 7]


def about(first: int, size: int = 40, document: list[int] = DOCUMENT) -> SimRequest:
    """A question at the end of the message with the document."""
    prompt = document + list(range(first, first + size))
    return SimRequest(prompt + TAIL, (len(prompt),), list(range(first, first + 900)))


@pytest.fixture
def prefix_cache() -> PrefixCache:
    return PrefixCache(budget=lambda: UNLIMITED)


def held(prefix_cache: PrefixCache, ids: list[int]) -> list[int]:
    """Token counts of the snapshots along a path."""
    path = prefix_cache.match(KEY, [*ids, 1], len(ids)).path
    return [node.stop for node in path if node.snapshot is not None]


# -- places


def test_a_short_prompt_gets_no_guess() -> None:
    assert choose_snapshots(Prompt([1] * 503, snapshot_points=(500,))) == (500,)


def test_a_long_message_gets_a_guess_on_the_grid() -> None:
    prompt = Prompt([1] * 8003, snapshot_points=(8000,))
    assert choose_snapshots(prompt) == (7488, 8000)
    assert choose_snapshots(prompt)[0] % GRID == 0


def test_a_prompt_without_messages_gets_a_guess_too() -> None:
    assert choose_snapshots(Prompt([1] * 8000)) == (7488,)


def test_a_continued_conversation_gets_no_guess() -> None:
    prompt = Prompt([1] * 8003, snapshot_points=(100, 8000))
    assert choose_snapshots(prompt, done=4100) == (8000,)
    assert len(choose_snapshots(prompt, done=3900)) == 2


def test_a_prompt_that_branches_off_gets_a_snapshot_at_the_branch() -> None:
    prompt = Prompt([1] * 8003, snapshot_points=(8000,))
    assert choose_snapshots(prompt, branch=7900) == (7872, 8000)
    assert choose_snapshots(prompt, branch=7900, grid=1) == (7900, 8000)
    assert choose_snapshots(prompt, done=7850, branch=7900) == (
        8000,
    )  # the branch is close to the resumed position
    assert choose_snapshots(prompt, branch=2000) == (1984, 7616, 8000)


def test_a_message_end_before_the_branch_is_enough() -> None:
    prompt = Prompt([1] * 8003, snapshot_points=(7890, 8000))
    assert choose_snapshots(prompt, branch=7900) == (7890, 8000)


def test_no_pass_ends_inside_an_image() -> None:
    image = MediaSpan(start=5000, end=7800, content_hash="x", inputs=None)
    prompt = Prompt([1] * 8003, snapshot_points=(8000,), spans=[image])
    assert choose_snapshots(prompt) == (7800, 8000)
    assert choose_snapshots(prompt, branch=5000) == (4992, 7800, 8000)


def test_a_prompt_of_many_images_has_few_passes() -> None:
    spans = [MediaSpan(i, i + 90, "x", None) for i in range(10, 9010, 100)]
    found = choose_snapshots(Prompt([1] * 9103, snapshot_points=(9100,), spans=spans), branch=4500)
    assert {100, 9100, *(span.end for span in spans[-2:])} <= {*found}
    assert len(found) <= 1 + RECENT + 2


# -- reuse


def test_a_branch_outlives_a_long_conversation_after_it(prefix_cache) -> None:
    model = SyntheticModel("hybrid", state_units=50)

    def ask(prompt: list[int]) -> int:
        ends = (200, len(prompt))  # of a system prompt, and of the last message
        return serve(prefix_cache, model, SimRequest(prompt + TAIL, ends, [6] * 400))

    ask(about(5000, 1500).prompt)
    prompt = about(10_000, 1500).prompt
    for turn in range(8):
        ask(prompt)
        prompt = prompt + TAIL + [6] * 399 + [9000 + turn] * 300
    assert ask(about(15_000, 1500).prompt) > 4000 - GRID


def test_a_reply_with_another_tokenization_is_no_branch(prefix_cache) -> None:
    """The client's text has other tokens than the reply; no later prompt branches off there."""
    model = SyntheticModel("hybrid", state_units=50)
    first = SimRequest(DOCUMENT + TAIL, (4000,), list(range(5000, 5600)))
    serve(prefix_cache, model, first)
    reply = [*first.reply[:400], 9999, *first.reply[401:]]
    ids = first.prompt + reply + [8000]
    assert prefix_cache.match(KEY, ids, len(ids)).diverged_at == 4403
    assert prefix_cache.match(KEY, ids, len(ids)).branch == 0
    other = DOCUMENT[:3000] + [9999] * 20
    assert prefix_cache.match(KEY, other, 3020).branch == 3000


# -- eviction


def test_a_path_holds_a_bounded_number_of_states(prefix_cache) -> None:
    """A document, then questions that branch off later each time, each with some turns."""
    model = SyntheticModel("hybrid", state_units=5)
    for turn in range(1, 9):
        for other in range(2):
            ids = DOCUMENT[: 480 * turn] + [5000 + other] * 90
            serve(prefix_cache, model, SimRequest(ids + TAIL, (200, len(ids)), [9000 + other] * 90))
            assert len(held(prefix_cache, ids)) <= 1 + RECENT + FORKS
    check_integrity(prefix_cache)
