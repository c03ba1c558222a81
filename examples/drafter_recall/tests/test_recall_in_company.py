"""Drafts in the engine: nobody's tokens change, and what was said is said again in few passes."""

from typing import Any

import pytest
from mlx_provider_recall.recall import Recall

from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import load_text
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import Eager, alone, new_engine, new_request, output_of, run
from tiny import build

VOCAB = 384


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_text(build(tmp_path_factory.mktemp("tiny"), "qwen3"), LoadOptions())


def ask(engine: Any, *prompts: range, **more: Any) -> list[Any]:
    requests = [new_request(prompt, max_tokens=40, **more) for prompt in prompts]
    run(engine, *requests)
    return requests


def test_recall_keeps_replies_equal_and_drafts_of_repeats_are_accepted(model: LoadedModel) -> None:
    speculation = Speculation(Source(Recall()), vocab=VOCAB, policy=Eager(), clock=lambda: 0.0)
    engine = new_engine(model, mixes=True, speculation=speculation, clock=lambda: 0.0)
    prompts = range(5, 30), range(40, 47), range(9, 60)
    first = ask(engine, *prompts, salt="one")
    again = ask(engine, *prompts, salt="one")
    others = ask(engine, *prompts, salt="two")
    for request in (*first, *again, *others):
        assert output_of(request).tokens == output_of(alone(model, request)).tokens
    held = [sum(request.accepted for request in part) for part in (first, again, others)]
    assert held[1] > 60
    assert max(held[0], held[2]) < held[1] / 2


def test_the_recall_drafter_is_found_by_name_and_not_chosen_automatically() -> None:
    registry = PluginRegistry.discover({})
    assert registry.drafter("recall").serves
    assert "recall" not in [drafter.name for drafter in registry.automatic_drafters()]
