"""Which drafters are tried, in which order, and what becomes of those that fail."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.logs import LogLines
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import load_drafters
from named_plugins import discover

Install = Callable[..., str]

DRAFTER = """
from mlx_provider import hookimpl
from mlx_provider.records import Drafter

class Guesses:
    def propose(self, rows):
        return [[] for row in rows]

def start(folder, model, options):
    {before}
    return Guesses()

@hookimpl
def mlx_drafters():
    yield Drafter("{name}", lambda folder, model, options: "{refuses}", start, hidden={hidden},
                  automatic={automatic}, reads_draft_model={reads}, keeps=lambda drafting: {keeps})
"""
ROOM = 1000


def drafter(
    name: str,
    automatic: int = 0,
    refuses: str = "",
    before: str = "pass",
    hidden: bool = False,
    keeps: int | str = 0,
    reads: bool = False,
) -> str:
    return DRAFTER.format(
        name=name,
        automatic=automatic,
        refuses=refuses,
        before=before,
        hidden=hidden,
        keeps=keeps,
        reads=reads,
    )


MODEL: Any = SimpleNamespace(info=SimpleNamespace(vocab_size=100))


def chosen(registry: PluginRegistry, **options: Any) -> str:
    return load_drafters(registry, Path(), MODEL, ModelOptions(**options), ROOM).drafter


def test_all_usable_drafters_are_chosen_unless_one_is_named(install_plugin: Install) -> None:
    low = install_plugin("aaa", drafter("low", 1))
    high = install_plugin("bbb", drafter("high", 2))
    never = install_plugin("ccc", drafter("never"))
    registry = discover(low, high, never)
    assert chosen(registry) == "high + low"
    assert chosen(registry, drafter="low") == "low"
    assert chosen(registry, drafter="off") == ""
    assert chosen(registry, drafter="never") == "never"
    assert chosen(discover(never)) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"refuses": "no head"},
        {"before": "raise OSError('broken')"},
        {"hidden": True},
        {"keeps": ROOM + 1},
    ],
)
def test_an_unusable_drafter_is_skipped(
    install_plugin: Install, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    able = install_plugin("aaa", drafter("able", 1))
    other_name = install_plugin("bbb", drafter("other", 2, **other))
    assert chosen(discover(able, other_name)) == "able"
    assert ("drafter other is left out" in caplog.text) == ("before" in other)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"before": "model.mtp"}, "a fault of plugin aaa (aaa "),
        ({"refuses": '" + model.mtp + "'}, "a fault of plugin aaa (aaa "),
        ({"keeps": "drafting.mtp"}, "a fault of plugin aaa (aaa "),
        ({"before": "raise OSError('mtp')"}, "memory or device of this machine"),
    ],
    ids=["start", "refuses", "keeps", "machine"],
)
def test_a_failed_drafter_is_logged_with_plugin_and_traceback(
    install_plugin: Install, fault: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = install_plugin("aaa", drafter("odd", 1, **fault))
    assert chosen(discover(name)) == ""
    (entry,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    first, *trace = LogLines("%(message)s").format(entry).splitlines()
    assert first.startswith("drafter odd is left out: it failed while it started (")
    assert words in first
    assert "mtp" not in first
    assert any("Error" in line and "mtp" in line for line in trace)


def test_an_unusable_named_drafter_is_refused_with_the_reason(install_plugin: Install) -> None:
    registry = discover(install_plugin("aaa", drafter("headless", refuses="no head")))
    with pytest.raises(BadRequest, match="headless cannot draft for this model: no head"):
        chosen(registry, drafter="headless")
    large = discover(install_plugin("bbb", drafter("large", keeps=ROOM + 1)))
    with pytest.raises(BadRequest, match="takes 1001 bytes beside the model, which leaves 1000"):
        chosen(large, drafter="large")
    with pytest.raises(BadRequest, match="did you mean 'headless'"):
        registry.drafter("headles")


def test_a_third_party_drafter_precedes_ours_of_equal_rank(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", drafter("ours", 1), name="ours")
    theirs = install_plugin("aaa", drafter("theirs", 1))
    assert chosen(discover(ours, theirs)) == "theirs + ours"


def test_a_model_without_hidden_states_gets_no_drafter_that_needs_them(
    install_plugin: Install,
) -> None:
    registry = discover(install_plugin("aaa", drafter("deep", 1, hidden=True)))
    state: Any = SimpleNamespace(**vars(MODEL), decode_hidden=str, prefill_hidden=str)
    for shows in (False, True):
        state.has_hidden_states = shows
        found = load_drafters(registry, Path(), state, ModelOptions(), ROOM)
        assert found.drafter == ("deep" if shows else "")


def test_only_the_best_drafter_that_reads_hidden_states_is_chosen(install_plugin: Install) -> None:
    """The drafter with hidden states comes last; the memory of all is within the room."""
    first = install_plugin("aaa", drafter("first", 2, hidden=True, keeps=ROOM // 2))
    second = install_plugin("bbb", drafter("second", 1, hidden=True))
    small = install_plugin("ccc", drafter("small", 3, keeps=ROOM // 2))
    large = install_plugin("ddd", drafter("large", 1, keeps=1))
    state: Any = SimpleNamespace(
        **vars(MODEL), decode_hidden=str, prefill_hidden=str, has_hidden_states=True
    )
    registry = discover(first, second, small, large)
    found = load_drafters(registry, Path(), state, ModelOptions(), ROOM)
    assert (found.drafter, found.nbytes) == ("small + first", ROOM)
    assert [source.hidden_model is state for source in found.speculation.sources] == [True, False]


def test_a_draft_model_folder_is_given_to_the_drafters_that_read_it(
    install_plugin: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """These precede all others. If none of them uses the folder, the log has their reasons."""
    (tmp_path / "config.json").write_text("{}")
    head = install_plugin("aaa", drafter("head", 2, refuses="no head here", reads=True))
    own = install_plugin("bbb", drafter("own", 3, refuses="none in the checkpoint"))
    last = install_plugin("ccc", drafter("last", 4))
    taker = install_plugin("ddd", drafter("taker", 1, reads=True))
    given = discover(head, own, last, taker)
    assert chosen(given, draft_model=str(tmp_path)) == "taker + last"
    assert chosen(discover(head, own, last, taker)) == "last + taker"
    assert caplog.messages == []
    assert chosen(discover(head, own, last), draft_model=str(tmp_path)) == "last"
    assert caplog.messages == [f"draft_model {tmp_path} is not used: drafter head: no head here"]
    (tmp_path / "config.json").write_text("{")
    assert chosen(given, draft_model=str(tmp_path)) == "last"
