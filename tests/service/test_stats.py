"""Live stats of a service, which never contain text of prompts."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.engine.prefix_cache.tree import Match
from mlx_provider.engine.step_output import Recorder, StepOutput
from mlx_provider.protocol.requests import Sampling
from mlx_provider.serving import engine_builder, loader, prefixes
from waiting import wait_until

SECRET = "The vault opens at midnight by the eastern door. "
QUIET = dict.fromkeys(range(8), -100.0)


@pytest.fixture(scope="module")
def own(tiny_class: Any, build_tiny: Any) -> Any:
    from in_process import InProcessClient
    from mlx_provider.serving.service import ChatService
    from mlx_provider.settings import EngineSettings

    service = ChatService(EngineSettings(max_rows=1))
    yield tiny_class(InProcessClient(service), service, str(build_tiny("qwen3")))
    service.close()


@pytest.fixture(autouse=True)
def waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine has the statistics of this moment, too, and none goes by the clock."""
    monkeypatch.setattr(prefixes, "STATS_WAIT", 300)
    monkeypatch.setattr("mlx_provider.serving.stats.WINDOW", 300)


def test_an_idle_service_has_empty_stats_and_a_memory_limit(make_service: Any) -> None:
    stats = make_service()[0].stats()
    assert (stats.requests, stats.engines, stats.prefix_cache.entries) == ([], [], 0)
    assert stats.memory.limit > 0


def test_a_request_is_told_of_the_load_of_its_own_model_alone(make_service: Any) -> None:
    service = make_service()[0]
    stage = service.models.progress.stage
    with stage("a with b", "weights"), stage("other", "weights"):
        assert service.loading("a").startswith("a with b: weights")
        assert "other" in service.loading()
        assert "other" not in service.loading("a") + service.loading("oth")


def test_stats_report_the_phases_of_a_load(
    own_model: Any,
    build_tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log, too, says that kernels are compiled."""
    caplog.set_level(logging.INFO, "mlx_provider")
    monkeypatch.setattr(prefixes, "STATS_WAIT", 0)  # the engine thread is busy
    monkeypatch.setattr(engine_builder, "compiles", lambda: True)
    model = own_model(build_tiny("qwen3"), measurements="off")
    client = model.client
    seen: dict[str, str] = {}
    healthy = set[str]()

    def looking(work: Callable[..., Any]) -> Callable[..., Any]:
        def look(*given: Any) -> Any:
            seen.update((each.what, each.summary) for each in client.stats().loading)
            healthy.add(client.health().detail)
            return work(*given)

        return look

    for module, name in (
        (loader, "equip"),
        (engine_builder, "compile_kernels"),
        (engine_builder, "probe"),
    ):
        monkeypatch.setattr(module, name, looking(getattr(module, name)))
    model.start("Hello", max_tokens=1).get()
    assert "qwen3: weights, 0.0 of 0.0 GB" in seen["weights"]
    compiling = "compiling kernels, once on this machine"
    assert seen[compiling].endswith(f"qwen3: {compiling}")
    assert any(line.endswith(f"qwen3: {compiling}") for line in caplog.messages)
    how = "measuring how rows decode together"
    assert seen[how].endswith(f"qwen3: {how}, step 1 of 2")
    assert healthy & {summary for summary in seen.values() if compiling in summary}
    assert (client.stats().loading, client.health().detail) == ([], "")


def test_stats_report_rows_and_memory_of_running_requests(own: Any) -> None:
    drawn = Sampling(temperature=1, seed=1, logit_bias=QUIET)
    with own.pausing(after=40):
        states = lambda: [each.state for each in own.client.stats().requests]  # noqa: E731
        running = own.start(SECRET * 4, max_tokens=400, sampling=drawn)
        wait_until(lambda: states() == ["decode"])  # a brief prompt would be first otherwise
        waiting = own.start("Hello", max_tokens=2)
        wait_until(lambda: states() == ["decode", "queued"])
        wait_until(lambda: own.client.stats().requests[0].completion_tokens > 4)
        stats = wait_until(lambda: (f := own.client.stats()).engines[0].queued and f)
        first, second = stats.requests
        assert first.id == running.accepted.id
        assert first.prompt_tokens == running.accepted.prompt_tokens
        assert first.prefilled_tokens + first.cached_tokens == first.prompt_tokens
        assert first.tokens_per_second > 0
        assert second.queued > 0
        assert second.queued == second.age, "its prefill has not begun"
        assert stats.waiting() == 1
        assert "vault" not in stats.model_dump_json()
        (engine,) = stats.engines
        assert (engine.queued, engine.rows) == (1, 1)
        assert engine.decoded_per_second > 0
        (memory,) = stats.memory.models
        assert memory.model == first.model == engine.model
        assert memory.weights > 0
        assert memory.rows > 0
    running.close()
    own.read(waiting)
    wait_until(lambda: states() == [])
    assert own.client.stats().memory.models[0].rows == 0


def test_models_with_one_base_name_are_reported_by_their_full_names(
    own_model: Any, build_tiny: Any, tmp_path: Path, caplog: Any
) -> None:
    """Two folders with one base name, in stats, metrics and log."""
    caplog.set_level(logging.INFO, "mlx_provider")
    names = [str(tmp_path / maker / "model") for maker in ("first", "second")]
    model = own_model(names[0])
    client = model.client
    for name in names:
        shutil.copytree(build_tiny("qwen3"), name)
        model.beside(name).ask("Hello", max_tokens=2)
    stats = client.stats()
    assert {each.model for each in stats.engines} == set(names)
    assert {each.model for each in stats.memory.models} == set(names)
    text = client.metrics().decode()
    for name in names:
        assert f'mlx_provider_requests{{model="{name}",state="decode"}} 0.0' in text
        assert f'mlx_provider_model_memory_bytes{{model="{name}",owner="weights"}} ' in text
        assert f"loaded {name} in" in caplog.text


def test_stats_of_a_cache_miss_have_the_reason_and_no_prompt_text(own: Any) -> None:
    own.client.cache_clear()
    text = SECRET * 4
    for asked in (text, text, text[:90] + "Q" + text[91:]):
        own.ask(asked, max_tokens=2)
    cache, metrics = own.client.stats().prefix_cache, own.client.metrics().decode()
    for outcome in ("hit", "cold", "diverged"):
        name = f'mlx_provider_prefix_lookup_tokens_total{{outcome="{outcome}"}} '
        assert float(metrics.split(name)[1].split()[0]) > 0
    assert cache.entries >= 2
    assert cache.nodes >= 2
    assert cache.bytes > 0
    told = own.client.stats().model_dump_json()
    assert "vault" not in told
    assert "/" not in cache.model_dump_json(), "no folder either"


def test_stats_do_not_wait_for_the_engine_thread(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own.ask(SECRET, max_tokens=2)
    before, busy = own.client.stats().prefix_cache, threading.Event()
    monkeypatch.setattr(prefixes, "STATS_WAIT", 0.05)
    own.service.worker.call(busy.wait)
    try:
        assert own.client.stats().prefix_cache.entries == before.entries > 0
    finally:
        busy.set()


def test_metrics_have_the_same_values(own: Any) -> None:
    own.ask(SECRET, max_tokens=2)
    text = own.client.metrics().decode()
    model = own.client.stats().memory.models[0].model
    for wanted in (
        f'mlx_provider_requests{{model="{model}",state="decode"}} 0.0',
        "mlx_provider_models_loaded 1.0",
        'mlx_provider_memory_bytes{owner="weights"} ',
        f'mlx_provider_model_memory_bytes{{model="{model}",owner="rows"}} 0.0',
        'mlx_provider_prefix_lookup_tokens_total{outcome="hit"} ',
        'mlx_provider_step_seconds_count{runs="chunk"} ',
    ):
        assert wanted in text, text
    assert "mlx_provider_chunk_tokens_count 0.0" not in text


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        ((100, 40, 60, 60), {"hit": 40, "no_state": 20, "diverged": 40}),
        ((100, 0, 0, 0), {"hit": 0, "no_state": 0, "cold": 100}),
        ((100, 99, 99, None), {"hit": 99, "no_state": 0, "new": 1}),
    ],
)
def test_every_token_of_a_prompt_is_accounted_for(found: Any, lost: dict[str, int]) -> None:
    counted: dict[str, int] = {}

    class Counting(Recorder):
        def count(self, name: str, n: int = 1, label: str = "") -> None:
            counted[label] = n

    asked, length, shared, diverged = found
    match = Match((), shared, length, asked, diverged_at=diverged)
    StepOutput(Counting(), time.monotonic, None).add_lookup(match)
    assert counted == lost
    assert sum(lost.values()) == asked
