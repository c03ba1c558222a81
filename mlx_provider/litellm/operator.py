"""Options of the gateway's operator, from the config entry's `model_info`: `mlx: {kv_bits: 8}` or
`mlx_kv_bits: 8`. Not from `optional_params`, which a client's body overrides."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import ValidationError

from ..errors import BadRequest
from ..protocol.options import ModelOptions, OperatorOptions

FLAT = "mlx_"
SHARED = "all"
CONFIGURED = "configured_model"


KEY = secrets.token_bytes(32)


class Configured(str):
    """The model of a config entry, kept in its `model_info`. A digest with a key of this process
    proves it, because LiteLLM 1.110 stores entries outside of Python. A text from a file or a
    database has none."""

    def __new__(cls, model: str) -> Self:
        digest = hashlib.blake2b(model.encode("utf-8", "surrogatepass"), key=KEY, digest_size=16)
        return super().__new__(cls, f"{model}#{digest.hexdigest()}")

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy is a plain text

    @classmethod
    def proves(cls, text: object) -> bool:
        return isinstance(text, str) and text == cls(text.rpartition("#")[0])


GATEWAYS = frozenset(OperatorOptions.model_fields) - frozenset(ModelOptions.model_fields)


def operator_options(litellm_params: Mapping[str, Any]) -> OperatorOptions:
    """Without options, the safe defaults. Raises `BadRequest` that names the option and its
    range."""
    info = litellm_params.get("model_info") or {}
    nested = info.get("mlx") or {}
    if not isinstance(nested, Mapping):
        raise BadRequest("model_info.mlx must be a mapping", param="model_info.mlx")
    flat = {name[len(FLAT) :]: info[name] for name in info if name.startswith(FLAT)}
    try:
        return OperatorOptions.model_validate({**flat, **nested})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(["model_info.mlx", *map(str, first["loc"])])
        raise BadRequest(f"{name}: {first['msg']}", param=name) from None


def engine_options(options: OperatorOptions) -> ModelOptions:
    return ModelOptions(**options.model_dump(exclude=set(GATEWAYS)))


TIERS = {"flex": 0.25, "priority": 4.0}
"""Shares of the device by service tier; any other tier: 1."""


@dataclass(frozen=True)
class Caller:
    """The caller, as the gateway names it. LiteLLM writes into `metadata` or `litellm_metadata`,
    depending on the route; the other one is the client's (1.106.2, proxy/litellm_pre_call_utils.py
    `add_litellm_data_to_request`, which removes `user_api_key_*` from both)."""

    key: str | None
    user: str | None
    """Of a caller without a key (JSON web tokens)."""
    team: str | None
    tier: str | None = None
    """`service_tier` of the metadata of its key, or of its team."""

    @classmethod
    def read(cls, litellm_params: Mapping[str, Any]) -> Caller:
        slots = [litellm_params.get(name) for name in ("metadata", "litellm_metadata")]
        both = [slot for slot in slots if isinstance(slot, Mapping)]

        def found(name: str) -> list[str]:
            return [value for slot in both if isinstance(value := slot.get(name), str)]

        return cls(
            key=next(iter(found("user_api_key_hash")), None),
            user=next(iter(found("user_api_key_user_id")), None),
            team=next(iter(found("user_api_key_team_id")), None),
            tier=next(filter(None, map(_tier, both)), None),
        )

    @property
    def account(self) -> str | None:
        return _alone(self)

    @property
    def share(self) -> float:
        return TIERS.get(self.tier or "", 1.0)


def _tier(slot: Mapping[str, Any]) -> str | None:
    details = (slot.get(f"user_api_key_{of}metadata") for of in ("", "team_"))
    found = (each.get("service_tier") for each in details if isinstance(each, Mapping))
    return next((tier for tier in found if isinstance(tier, str)), None)


def tenant(options: OperatorOptions, caller: Caller) -> str | None:
    """Namespace of the prefix cache; `None`: shared by all. A key without a team shares with no
    other key. Without keys (a script, a proxy without a master key), there is one namespace."""
    if options.cache_salt == SHARED:
        return None
    if options.cache_salt == "team" and caller.team:
        return f"team:{caller.team}"
    if options.cache_salt in ("key", "team"):
        return _alone(caller)
    return f"fixed:{options.cache_salt}"


def _alone(caller: Caller) -> str | None:
    if caller.key:
        return f"key:{caller.key}"
    if caller.user:
        return f"user:{caller.user}"
    return f"team:{caller.team}" if caller.team else None


def chosen_by(litellm_params: Mapping[str, Any], model: str) -> Literal["owner", "client"]:
    """`owner`, if the config entry of this call names exactly this model. Reads the entry's
    `model_info`, because all models of a comma list share `metadata`. A script that calls without a
    router is the owner."""
    info = litellm_params.get("model_info") or {}
    if not info and not litellm_params.get("proxy_server_request"):
        return "owner"
    return "owner" if info.get(CONFIGURED) == Configured(model) else "client"
