"""Steps of an engine, some or up to a condition."""

from collections.abc import Callable

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Request


def step_until(engine: Engine, condition: Callable[[], object], most: int = 10_000) -> None:
    """A test in vain fails; it does not run for ever."""
    for _ in range(most):
        if condition():
            return
        engine.step()
    raise AssertionError(f"not within {most} steps")


def submit(engine: Engine, *requests: Request, steps: int = 0) -> None:
    """Submit these requests, and run some steps."""
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
