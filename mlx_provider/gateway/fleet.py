"""The configuration of a LiteLLM proxy for several engines on other machines.

LiteLLM's router does the work (1.106.2, `router.py`): it selects engines, retries, pins sessions
and skips engines that fail. `litellm/fleet.py` tells it which entries belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..client.address import parse_address
from ..errors import BadRequest
from .config import AGENTS, Served, served_config

OUT = 10
"""Seconds without requests to an engine that did not answer."""
REDIS = "REDIS_URL"
MANY = 1_000_000
"""Refusals of a request for reasons in the request, which do not count against an engine."""


@dataclass(frozen=True)
class Fleet:
    """The engines and models behind a proxy. Raises `BadRequest` for an invalid address or name."""

    engines: tuple[str, ...]
    """Addresses: `http(s)://host:port`."""
    fallbacks: tuple[str, ...] = ()
    """LiteLLM's names of fallback models, in order."""
    redis: str | None = None
    """The Redis that several proxies share."""
    stock: bool = False
    """Whether the proxy has no package of ours: it reaches engines by LiteLLM's own providers."""

    def __post_init__(self) -> None:
        for address in self.engines:
            if parse_address(address).socket:
                raise BadRequest(
                    f"engine {address!r}: one on another machine is http(s)://host:port",
                    param="engine",
                )
        for named in (self.engines, self.fallbacks):
            twice = {each for each in named if named.count(each) > 1}
            if twice:
                raise BadRequest(f"given twice: {', '.join(sorted(twice))}", param="engine")
        for name in self.fallbacks:
            if "/" not in name:
                raise BadRequest(
                    f"fallback {name!r} is not of the form provider/model", param="fallback"
                )
        if self.redis and urlsplit(self.redis).scheme not in ("redis", "rediss", "unix"):
            raise BadRequest("redis must be redis://host:port or rediss://", param="redis")

    @property
    def keys(self) -> dict[str, str]:
        """The engine for each variable that holds an engine's key."""
        return {f"ENGINE_{n}_KEY": address for n, address in enumerate(self.engines, 1)}


def fleet_config(served: Served, fleet: Fleet, names: tuple[str, ...] = AGENTS) -> dict[str, Any]:
    """A proxy's config for one model on several engines, without keys."""
    config = served_config(served, names)
    if fleet.stock:
        del config["litellm_settings"]["custom_provider_map"]
    config["model_list"] = [
        _on_engine(entry, address, variable, served.model if fleet.stock else None)
        for entry in config["model_list"]
        for variable, address in fleet.keys.items()
    ] + [_other(name) for name in fleet.fallbacks]
    config["router_settings"] |= _router(fleet)
    return config


def _on_engine(
    entry: Mapping[str, Any], address: str, variable: str, stock: str | None
) -> dict[str, Any]:
    """An entry of a model for this engine. `stock`: the model, if LiteLLM's own provider serves it.

    It has an id of its own, because two proxies must use the same id for an engine, and LiteLLM's
    default depends on the key, too.
    """
    place = {"api_base": address, "api_key": f"os.environ/{variable}"}
    own = {"id": f"{entry['model_name']} on {urlsplit(address).netloc}"}
    info = {**own, **entry["model_info"]}
    if stock is not None:
        place |= _by_stock(entry["model_name"], stock, address)
        info.pop("mlx", None)
    return {
        **entry,
        "litellm_params": {**entry["litellm_params"], **place},
        "model_info": info,
    }


def _by_stock(name: str, model: str, address: str) -> dict[str, str]:
    """The API in which clients of this name speak, so that LiteLLM passes it on as it is."""
    address = address.rstrip("/")
    if name.startswith("claude"):
        return {"model": f"anthropic/{model}", "api_base": address}
    return {"model": f"hosted_vllm/{model}", "api_base": f"{address}/v1"}


def _other(name: str) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": name}}


def _router(fleet: Fleet) -> dict[str, Any]:
    """The settings of LiteLLM's router for engines.

    A request that is refused because its engine is full, ends or is gone is sent to each other
    engine; other errors are returned. Only an engine that does not answer is skipped for a while.
    """
    others = len(fleet.engines) - 1
    settings: dict[str, Any] = {
        "routing_strategy": "least-busy",
        "optional_pre_call_checks": ["session_affinity"],
        "cooldown_time": OUT,
        "retry_policy": {
            "ServiceUnavailableErrorRetries": others,
            "RateLimitErrorRetries": others,
            "InternalServerErrorRetries": 0,
            "BadRequestErrorRetries": 0,
            "TimeoutErrorRetries": 0,
        },
        "allowed_fails_policy": {
            "ServiceUnavailableErrorAllowedFails": 0,
            "RateLimitErrorAllowedFails": MANY,
            "TimeoutErrorAllowedFails": MANY,
        },
    }
    if fleet.fallbacks:
        taking_over = [{"*": list(fleet.fallbacks)}]
        settings |= {"fallbacks": taking_over, "context_window_fallbacks": taking_over}
    if fleet.redis:
        settings["redis_url"] = f"os.environ/{REDIS}"
    return settings
