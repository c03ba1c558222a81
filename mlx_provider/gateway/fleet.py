"""The configuration of a LiteLLM proxy in front of several engines on other machines.

LiteLLM's router does the work (1.106.2, `router.py`): it chooses, retries, pins
sessions and leaves what fails. `litellm/fleet.py` tells it what belongs together.
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
"""Seconds for which an engine that did not answer is asked nothing."""
REDIS = "REDIS_URL"
MANY = 1_000_000
"""Refusals of one request for its own sake, which say nothing against an engine."""


@dataclass(frozen=True)
class Fleet:
    """What stands behind a proxy. Raises `BadRequest` for an address or a name that is none."""

    engines: tuple[str, ...]
    """Addresses: `http(s)://host:port`."""
    fallbacks: tuple[str, ...] = ()
    """LiteLLM's names of other models, in the order in which they take over."""
    redis: str | None = None
    """Where several proxies share what they know."""

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
        """The variable that holds an engine's key: the engine."""
        return {f"ENGINE_{n}_KEY": address for n, address in enumerate(self.engines, 1)}


def fleet_config(served: Served, fleet: Fleet, names: tuple[str, ...] = AGENTS) -> dict[str, Any]:
    """A proxy's config for one model on several engines, without any key."""
    config = served_config(served, names)
    config["model_list"] = [
        _on_engine(entry, address, variable)
        for entry in config["model_list"]
        for variable, address in fleet.keys.items()
    ] + [_other(name) for name in fleet.fallbacks]
    config["router_settings"] |= _router(fleet)
    return config


def _on_engine(entry: Mapping[str, Any], address: str, variable: str) -> dict[str, Any]:
    """An entry of a model, as this engine serves it.

    With an id of its own: two proxies must mean the same engine by it, and LiteLLM's default is
    made from the key, too.
    """
    place = {"api_base": address, "api_key": f"os.environ/{variable}"}
    own = {"id": f"{entry['model_name']} on {urlsplit(address).netloc}"}
    return {
        **entry,
        "litellm_params": {**entry["litellm_params"], **place},
        "model_info": {**own, **entry["model_info"]},
    }


def _other(name: str) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": name}}


def _router(fleet: Fleet) -> dict[str, Any]:
    """How LiteLLM's router treats engines.

    A request that was refused because its engine is full, ends or is gone is asked of each other
    one; its other errors are its own. Only who does not answer is left alone for a while.
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
