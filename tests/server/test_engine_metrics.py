"""What the operator reads."""

from typing import Any

from mlx_provider.protocol.health import EngineStats, RequestStats, Stats
from mlx_provider.serving.metrics import EngineMetrics


def value(metrics: EngineMetrics, name: str) -> float:
    for line in metrics.exposition().decode().splitlines():
        if line.startswith(f"mlx_provider_{name} "):
            return float(line.split()[-1])
    raise AssertionError(name)


def test_counted_and_observed_values_appear_in_the_metrics() -> None:
    metrics = EngineMetrics()
    for name in ("requests_received", "requests_started"):
        metrics.count(name)
    metrics.count("requests_finished", label="stop")
    metrics.count("requests_failed", label="overloaded")
    metrics.count("prompt_tokens_prefilled", 100)
    metrics.count("prompt_tokens_cached", 20)
    metrics.count("tokens_decoded", 3)
    metrics.observe("first_token_seconds", 0.3)
    metrics.observe("inter_token_seconds", 0.011)
    metrics.count("prefix_cache_evictions", 8)
    wanted: dict[str, Any] = {
        "requests_received_total": 1,
        "requests_started_total": 1,
        'requests_finished_total{reason="stop"}': 1,
        'requests_failed_total{code="overloaded"}': 1,
        "prompt_tokens_prefilled_total": 100,
        "prompt_tokens_cached_total": 20,
        "tokens_decoded_total": 3,
        "first_token_seconds_count": 1,
        'first_token_seconds_bucket{le="0.5"}': 1,
        'first_token_seconds_bucket{le="0.2"}': 0,
        "inter_token_seconds_sum": 0.011,
        "prefix_cache_evictions_total": 8,
    }
    assert {name: value(metrics, name) for name in wanted} == wanted


def test_two_engines_have_separate_metrics() -> None:
    first, second = EngineMetrics(), EngineMetrics()
    first.count("requests_received")
    assert value(first, "requests_received_total") == 1
    assert value(second, "requests_received_total") == 0


def test_model_names_of_waiting_requests_create_no_metric_series() -> None:
    requests = [RequestStats(id=str(i), model=f"anything-{i}", state="preparing") for i in range(9)]
    requests.append(RequestStats(id="r", model="here", state="decode"))
    engine = EngineStats(model="here", layout="solo", mixes=False, queued=2, rows=1)
    stats = Stats(at=0, version="1", device="d", pid=1, requests=requests, engines=[engine])
    told = EngineMetrics(lambda: stats).exposition().decode()
    assert "anything" not in told
    assert 'mlx_provider_requests{model="",state="preparing"} 9.0' in told
    assert 'mlx_provider_requests{model="here",state="decode"} 1.0' in told
    assert "mlx_provider_requests_queued 2.0" in told
    assert "mlx_provider_requests_running 1.0" in told
