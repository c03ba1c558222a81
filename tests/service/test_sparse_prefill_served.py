"""Sparse prefill of long prompts on a served model: choices of operator and client, refusals."""

from typing import Any

import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.events import Done, Timings
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.serving import drafting as sparse_prefill
from mlx_provider.wire.openai.answer import usage_of

NO_TIMES = Timings(queued=0, prefill=0, first_token=0, total=0, tokens_per_second=0)

PROMPT = [20 + (i * i * 31 + i // 7) % 300 for i in range(600)]


@pytest.fixture(scope="module")
def draft(build_tiny: Any) -> str:
    return str(build_tiny("qwen3", seed=3, num_hidden_layers=1))


@pytest.fixture(autouse=True)
def _prompts_are_long_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_prefill, "LONG", 512)


@pytest.fixture
def model(own_model: Any, build_tiny: Any) -> Any:
    return own_model(build_tiny("qwen3"))


def sparse(draft: str | None, **more: Any) -> ModelOptions:
    given = {"sparse_prefill": 0.4, "draft_model": draft, **more}
    return ModelOptions(**given)


def test_a_long_prompt_is_prefilled_in_part_unless_the_client_refuses(
    model: Any, draft: str
) -> None:
    options = sparse(draft)
    part = model.ask(prompt=PROMPT, options=options)
    assert 300 < part.usage.skipped_tokens < 400
    assert part.usage.prompt_tokens == 600
    told = usage_of(Done(usage=part.usage, timings=NO_TIMES))
    details = told["prompt_tokens_details"]
    assert details["skipped_tokens"] == part.usage.skipped_tokens
    told = model.service.metrics().decode()
    assert f"mlx_provider_tokens_skipped_total {float(part.usage.skipped_tokens)}" in told

    whole = model.ask(prompt=PROMPT, options=options, sparse_prefill=False)
    plain = model.ask(prompt=PROMPT, options=ModelOptions(drafter="off"))
    assert (whole.usage.skipped_tokens, plain.usage.skipped_tokens) == (0, 0)
    assert whole.only.content == plain.only.content != part.only.content
    told = usage_of(Done(usage=whole.usage, timings=NO_TIMES))
    assert "skipped_tokens" not in told["prompt_tokens_details"]

    short = model.ask(prompt=PROMPT[:511], options=options, sparse_prefill=True)
    assert short.usage.skipped_tokens == 0
    again = model.ask(prompt=PROMPT, options=options)
    assert again.usage.cached_tokens > 500, "the whole one is found, and goes before"
    assert again.only.content == whole.only.content


def test_warm_prompts_are_prefilled_whole(model: Any, draft: str) -> None:
    """Requests can reuse only whole prompts."""
    system = "The quick brown fox asks the lazy dog what the weather is like. " * 24
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "."}]
    options = sparse(draft, warm=[system])
    first = model.ask(messages=messages, options=options)
    assert first.prompt_tokens > 512
    later = model.ask(messages=messages, options=options)
    assert later.usage.cached_tokens > 256


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"reproducible": True, "draft_model": None}, "every token"),
        ({"kv_bits": 8}, "kv_bits"),
        ({"drafter": "off"}, "drafter is off"),
        ({"draft_model": None}, "name a draft_model"),
        ({"drafter": "lookup"}, "name a draft_model"),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(
    model: Any, draft: str, more: dict[str, Any], told: str
) -> None:
    assert_refused(model, sparse(draft, **more), told)


def test_models_with_states_prefill_in_part(model: Any, build_tiny: Any) -> None:
    model.model = str(build_tiny("qwen3_5_text"))
    part = model.ask(prompt=PROMPT, options=sparse(str(build_tiny("qwen3_5_text", seed=1))))
    assert 300 < part.usage.skipped_tokens < 400


@pytest.mark.parametrize(
    ("family", "kind"), [("llama4", "ChunkedKVCache"), ("gemma3_text", "RotatingKVCache")]
)
def test_models_whose_layers_need_every_token_are_refused(
    model: Any, build_tiny: Any, draft: str, family: str, kind: str
) -> None:
    model.model = str(build_tiny(family))
    assert_refused(model, sparse(draft), kind)


def test_a_draft_model_larger_than_the_model_is_refused(model: Any, build_tiny: Any) -> None:
    large = str(build_tiny("qwen3", num_hidden_layers=9))
    assert_refused(model, sparse(large), "for each token of a prompt")


def assert_refused(model: Any, options: ModelOptions, told: str) -> None:
    with pytest.raises(BadRequest) as refused:
        model.ask(options=options)
    assert refused.value.status == 400
    assert refused.value.param == "model_info.mlx.sparse_prefill"
    assert told in refused.value.message


@pytest.mark.parametrize("share", [0.0, 0.05, 0.95, 1.0])
def test_a_share_out_of_bounds_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="sparse_prefill"):
        ModelOptions(sparse_prefill=share)
