"""Steps of an engine up to a condition."""

from collections.abc import Callable

from mlx_provider.engine.engine import Engine


def step_until(engine: Engine, condition: Callable[[], object], most: int = 10_000) -> None:
    """A test in vain fails; it does not run for ever."""
    for _ in range(most):
        if condition():
            return
        engine.step()
    raise AssertionError(f"not within {most} steps")
