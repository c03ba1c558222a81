"""The drafter of a served model: the operator's choice, and what clients and operators can read."""

from typing import Any

import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import ModelOptions

MTP = {"foreseeable": True, "mtp_num_hidden_layers": 1}


@pytest.fixture
def model(own_model: Any, build_tiny: Any) -> Any:
    """A model with a drafting head, on a separate service."""
    return own_model(build_tiny("qwen3_5_text", **MTP))


def drafters(model: Any) -> set[str]:
    return {status.drafter for status in model.client.health().models}


@pytest.mark.usefixtures("eager_drafts")
def test_the_head_of_a_checkpoint_drafts_unless_it_is_switched_off(model: Any) -> None:
    plain = model.ask(max_tokens=30, options=ModelOptions(drafter="off"))
    assert drafters(model) == {""}
    answer = model.ask(max_tokens=30)
    assert drafters(model) == {"", "mtp + lookup"}
    assert answer.only.content == plain.only.content
    assert (plain.usage.drafted_tokens, plain.usage.accepted_tokens) == (0, 0)
    assert answer.usage.drafted_tokens >= max(1, answer.usage.accepted_tokens)


def test_a_client_may_have_no_drafts(model: Any) -> None:
    assert model.ask(max_tokens=20, drafts=False).usage.drafted_tokens == 0


@pytest.mark.usefixtures("eager_drafts")
def test_the_stats_have_the_number_of_accepted_drafts(model: Any) -> None:
    answer = model.ask(max_tokens=30, options=ModelOptions())
    told = model.service.metrics().decode()
    assert answer.usage.drafted_tokens > 0
    assert f"mlx_provider_tokens_drafted_total {float(answer.usage.drafted_tokens)}" in told
    assert f"mlx_provider_tokens_accepted_total {float(answer.usage.accepted_tokens)}" in told
    (engine,) = model.service.stats().engines
    assert engine.drafter == "mtp + lookup"
    assert engine.drafted_tokens == answer.usage.drafted_tokens
    assert engine.accepted_tokens == answer.usage.accepted_tokens
    labels = f'drafter="mtp + lookup",model="{engine.model}"'
    assert f"mlx_provider_drafter_tokens_drafted{{{labels}}} {float(engine.drafted_tokens)}" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drafter": "eagles"}, "model_info.mlx.drafter"),
        ({"drafter": "model"}, "model_info.mlx.drafter"),
        ({"draft_model": "/nowhere"}, "model_info.mlx.draft_model"),
    ],
)
def test_an_option_of_a_model_that_cannot_draft_is_refused_by_name(
    model: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        model.ask(options=ModelOptions(**options))
    assert told in f"{refused.value.param} {refused.value.message}"


def test_the_memory_of_a_drafter_is_not_available_for_rows(model: Any) -> None:
    models = model.service.models
    before = models.ledger.free
    model.ask(max_tokens=2, options=ModelOptions(drafter="mtp"))
    (loaded,) = models.queue.models()
    drafter = loaded.instance.drafter_bytes
    assert 0 < drafter <= before - models.ledger.free - loaded.loaded_bytes
