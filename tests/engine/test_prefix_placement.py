"""Where snapshots inside messages are placed, and which ones are evicted first."""

import pytest

from agent_traffic import SimRequest, SyntheticModel, Traffic, serve
from mlx_provider.engine.prefix_cache import policy as placement
from mlx_provider.engine.prefix_cache.cache import CacheKey, PrefixCache
from mlx_provider.engine.prefix_cache.paths import INSIDE, RECENT
from mlx_provider.engine.prefix_cache.policy import GRID, places
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


def test_a_long_message_gets_guesses_on_the_grid() -> None:
    """One guess close to its end, one a quarter before the end."""
    prompt = Prompt([1] * 8003, snapshot_points=(8000,))
    assert places(prompt) == (5952, 7488, 8000)
    assert all(at % GRID == 0 for at in places(prompt)[:2])


def test_a_continued_conversation_gets_no_guess() -> None:
    prompt = Prompt([1] * 8003, snapshot_points=(100, 8000))
    assert places(prompt, done=4100) == (8000,)
    assert len(places(prompt, done=3900)) == 3


def test_a_prompt_that_branches_off_gets_a_snapshot_at_the_branch() -> None:
    prompt = Prompt([1] * 8003, snapshot_points=(8000,))
    assert places(prompt, branch=7900) == (7872, 8000)
    assert places(prompt, branch=7900, grid=1) == (7900, 8000)
    assert places(prompt, done=7850, branch=7900) == (
        8000,
    )  # the branch is close to the resumed position
    assert 1984 in places(prompt, branch=2000)


def test_no_pass_ends_inside_an_image() -> None:
    image = MediaSpan(start=5000, end=7800, content_hash="x", inputs=None)
    prompt = Prompt([1] * 8003, snapshot_points=(8000,), spans=[image])
    assert places(prompt) == (7800, 8000)
    assert places(prompt, branch=5000) == (4992, 7800, 8000)


def test_a_prompt_of_many_images_has_few_passes() -> None:
    spans = [MediaSpan(i, i + 90, "x", None) for i in range(10, 9010, 100)]
    found = places(Prompt([1] * 9103, snapshot_points=(9100,), spans=spans), branch=4500)
    assert {100, 9100, *(span.end for span in spans[-2:])} <= {*found}
    assert len(found) <= 1 + RECENT + 3


# -- reuse


@pytest.mark.parametrize("layers", ["hybrid", "state", "window"])
def test_the_second_question_resumes_from_a_guess(prefix_cache: PrefixCache, layers) -> None:
    model = SyntheticModel(layers, state_units=50)
    assert serve(prefix_cache, model, about(5000)) == 0
    assert serve(prefix_cache, model, about(6000)) >= 0.9 * 4043
    prefix_cache.check_integrity()


@pytest.mark.parametrize("layers", ["hybrid", "state", "window"])
@pytest.mark.parametrize("size", [200, 1500])
def test_the_third_question_resumes_at_the_branch(prefix_cache, layers, size) -> None:
    """The second prompt that branches off leaves a snapshot there, at any distance from the end."""
    model = SyntheticModel(layers, state_units=50)
    serve(prefix_cache, model, about(5000, size))
    assert serve(prefix_cache, model, about(10_000, size)) < 4000 - GRID
    assert serve(prefix_cache, model, about(15_000, size)) > 4000 - GRID
    prefix_cache.check_integrity()


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
            assert len(held(prefix_cache, ids)) <= 1 + RECENT + INSIDE
    prefix_cache.check_integrity()


def test_a_branch_replaces_a_guess(prefix_cache) -> None:
    """Of two guesses and a branch on one path, the first guess is evicted, because it is unused."""
    model = SyntheticModel("hybrid", state_units=50)
    serve(prefix_cache, model, about(5000, 200))
    assert held(prefix_cache, about(5000, 200).prompt)[:2] == [3136, 3904]
    serve(prefix_cache, model, about(6000, 200, DOCUMENT[:3600]))
    assert held(prefix_cache, about(5000, 200).prompt)[:2] == [3136, 3584]


def test_guesses_are_evicted_first(prefix_cache) -> None:
    model = SyntheticModel("hybrid", state_units=1000)
    asked = about(5000), about(20_000, document=list(range(30_000, 34_000)))
    for request in asked:
        serve(prefix_cache, model, request)
        assert held(prefix_cache, request.prompt) == [3008, 3776, 4040]
    prefix_cache.evict(prefix_cache.nbytes - 4 * 4 * model.state_floats)
    assert [held(prefix_cache, request.prompt) for request in asked] == [[4040], [4040]]


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
def test_guesses_evict_no_conversation(share, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also guesses on the growing path itself: of one agent, and of two agents that alternate."""
    model = SyntheticModel("hybrid")
    traffic = Traffic(0).agent(tasks=2, steps=5, system=6000)
    whole = PrefixCache(budget=lambda: UNLIMITED)
    hits = []
    for guessed in ((), placement.GUESSED):
        monkeypatch.setattr(placement, "GUESSED", guessed)
        for request in traffic if not guessed else ():
            serve(whole, model, request)
        tight = PrefixCache(budget=lambda: int(share * whole.nbytes))
        hits.append([serve(tight, model, request) for request in traffic])
        tight.check_integrity()
        assert tight.nbytes <= share * whole.nbytes
    assert sum(hits[0]) <= sum(hits[1])


def test_a_guess_evicts_only_entries_of_less_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full store takes no guess while all its entries are in use."""
    model = SyntheticModel("hybrid", state_units=1000)
    asked = [about(5000 + n, document=list(range(n, n + 4000))) for n in (10_000, 20_000)]
    stored = []
    for guessed in ((), placement.GUESSED):
        monkeypatch.setattr(placement, "GUESSED", guessed)
        prefix_cache = PrefixCache(budget=lambda: stored[0] if stored else UNLIMITED)
        for request in asked:
            serve(prefix_cache, model, request)
        stored.append(
            prefix_cache.nbytes + 4 * model.state_floats
        )  # includes the snapshot at the prompt's end
    ends = [held(prefix_cache, [*request.prompt, *request.reply]) for request in asked]
    assert all({4040, 4943} <= {*each} for each in ends)
    prefix_cache.check_integrity()
