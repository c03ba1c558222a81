"""What a request gets alone, computed once: many tests ask the same of one model."""

from functools import lru_cache
from typing import Any

from mlx_provider.engine.request import Request
from mlx_provider.records import LoadedModel
from mlx_provider.testing import driver
from mlx_provider.testing.driver import output_of


class _Asked:
    """One model and one request, equal to others by all that the answer depends on."""

    def __init__(self, model: LoadedModel, request: Request) -> None:
        self.model, self.request = model, request
        self.key: tuple[Any, ...] = (
            id(model),
            tuple(request.prompt.tokens),
            request.max_tokens,
            len(request.rows),
            request.params,
            request.min_tokens,
            request.stop_tokens,
            request.logprobs,
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key


@lru_cache(maxsize=1000)
def _answered(asked: _Asked) -> Request:
    return driver.alone(asked.model, asked.request)


def alone(model: LoadedModel, request: Request) -> Request:
    """`driver.alone`, for models whose answers do not change from one call to the next."""
    return _answered(_Asked(model, request))


def assert_as_alone(model: LoadedModel, *requests: Request) -> None:
    for request in requests:
        assert output_of(request).tokens == output_of(alone(model, request)).tokens
