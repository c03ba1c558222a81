"""What a request gets alone, computed once: many tests ask the same of one model."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mlx_provider.engine.request import Request
from mlx_provider.records import LoadedModel
from mlx_provider.testing import driver
from mlx_provider.testing.driver import output_of
from mlx_provider.upstream import mlx_lm
from tolerances import logprob_tolerance


class _Asked:
    """One model and one request, equal to others by all that the answer depends on."""

    def __init__(self, model: LoadedModel, request: Request, bits: int | None) -> None:
        self.model, self.request, self.bits = model, request, bits
        self.key: tuple[Any, ...] = (
            id(model),
            bits,
            tuple(request.prompt.tokens),
            tuple(span.content_hash for span in request.prompt.spans),
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
    make_cache = quantised(asked.model, asked.bits)
    return driver.alone(asked.model, asked.request, make_cache=make_cache)


def quantised(model: LoadedModel, bits: int | None) -> Callable[[], list[Any]] | None:
    return None if bits is None else lambda: mlx_lm.quantise_cache(model.make_cache(), bits, 32)


def alone(model: LoadedModel, request: Request, bits: int | None = None) -> Request:
    """`driver.alone`, for models whose answers do not change from one call to the next. `bits`: of
    its keys and values."""
    return _answered(_Asked(model, request, bits))


def assert_as_alone(model: LoadedModel, *requests: Request) -> None:
    for request in requests:
        assert output_of(request).tokens == output_of(alone(model, request)).tokens


def assert_near_alone(
    model: LoadedModel, *requests: Request, whole: bool = True, bits: int | None = None
) -> None:
    """Log-probabilities, too. `whole`: unless they were cancelled."""
    twins, family = {each: alone(model, each, bits) for each in requests}, model.info.model_type
    for row in (row for request in requests for row in request.rows):
        got, want = output_of(row.request, row.index), output_of(twins[row.request], row.index)
        assert got.tokens == (want.tokens if whole else want.tokens[: len(got.tokens)])
        for mine, theirs in zip(got.logprobs, want.logprobs, strict=whole):
            assert abs(mine.logprob - theirs.logprob) <= logprob_tolerance(bits=bits, family=family)
