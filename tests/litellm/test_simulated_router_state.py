"""What the simulated router keeps is what LiteLLM's own cache keeps, item for item."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from litellm.caching.affinity_cache import set_local_affinity_pin
from litellm.caching.dual_cache import DualCache
from litellm.caching.in_memory_cache import DEFAULT_MAX_SIZE_IN_MEMORY, InMemoryCache
from litellm.router_strategy.least_busy import IN_FLIGHT_COUNT_TTL_SECONDS, LeastBusyLoggingHandler

from simulation.router_state import LITELLM, TTL, Counts, Memory

STEPS = st.tuples(
    st.sampled_from(["pin", "begins", "ends"]),
    st.integers(0, 5),
    st.sampled_from([0.5, 7.0, 900.0, 3599.0, 3700.0]),
)


def test_its_figures_are_litellms() -> None:
    assert LITELLM == DEFAULT_MAX_SIZE_IN_MEMORY
    assert TTL == IN_FLIGHT_COUNT_TTL_SECONDS


@settings(max_examples=80)
@given(st.lists(STEPS, max_size=40), st.sampled_from([2, 4, 8, 1000]))
def test_the_same_items_stay(steps: list[tuple[str, int, float]], most: int) -> None:
    now = [0.0]
    real = InMemoryCache(max_size_in_memory=most, clock=lambda: now[0])
    cache = DualCache(in_memory_cache=real)
    counting = LeastBusyLoggingHandler(cache)
    counts = Counts(6)
    ours = Memory(counts, most)
    for what, number, later in steps:
        now[0] += later
        if what == "pin":
            ours.put_pin(number, number + 10, now[0])
            set_local_affinity_pin(cache, f"pin-{number}", number + 10, int(TTL))
        else:
            more = 1 if what == "begins" else -1
            ours.change(number, more, now[0])
            counting._increment(_call(number), more)
        assert _items(ours) == _real(real)
        assert counts.of == [max(0, ours.items.get(~n, (0, 0))[1]) for n in range(6)]
        assert counts.fewest(0b111111) == sum(
            1 << n for n in range(6) if counts.of[n] == min(counts.of)
        )


def _call(number: int) -> dict[str, object]:
    params = {"metadata": {"model_group": "m"}, "model_info": {"id": str(number)}}
    return {"litellm_params": params}


def _items(ours: Memory) -> dict[str, int]:
    return {
        f"pin-{name}" if name >= 0 else f"m_request_count:{~name}": value
        for name, (_, value) in ours.items.items()
    }


def _real(real: InMemoryCache) -> dict[str, int]:
    return {name: int(value) for name, value in real.cache_dict.items()}
