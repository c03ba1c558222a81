"""Options of the gateway's operator and fields of its callers. Facts about our models for LiteLLM:
in its map of models, and in the `model_info` of config entries."""

import hashlib
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import litellm
from pydantic import ValidationError

from ..errors import BadRequest
from ..protocol.events import Accepted
from ..protocol.requests import ModelOptions, OperatorOptions
from ..registry import PluginRegistry
from ..serving.hub import ModelFacts, facts_of
from .errors import PROVIDER

FLAT = "mlx_"  # prefix of an option outside of `mlx`
CONFIGURED = "configured_model"  # member of `model_info` with the result of `sign`
KEY = secrets.token_bytes(32)


def sign(model: str) -> str:
    """The model of a config entry with a digest, by a key of this process: a text that a file or a
    database puts into `model_info` has no such digest."""
    digest = hashlib.blake2b(model.encode("utf-8", "surrogatepass"), key=KEY, digest_size=16)
    return f"{model}#{digest.hexdigest()}"


def proxy_server() -> Any:
    """The module of LiteLLM's proxy; `None` in a script."""
    return sys.modules.get("litellm.proxy.proxy_server")


def operator_options(litellm_params: Mapping[str, Any]) -> OperatorOptions:
    """From the config entry's `model_info`: `mlx: {kv_bits: 8}` or `mlx_kv_bits: 8`. Not from
    `optional_params`, which a client's body overrides. Raises `BadRequest` for a wrong option."""
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
    return ModelOptions(**options.model_dump(include=set(ModelOptions.model_fields)))


TIERS = {"flex": 0.25, "priority": 4.0}  # shares of the device; any other service tier: 1


def caller_fields(litellm_params: Mapping[str, Any], cache_salt: str) -> dict[str, Any]:
    """`salt`, `tenant` and `share` of a request. The gateway names the caller in `metadata` or
    `litellm_metadata`; the other one is the client's, without `user_api_key_*` (1.106.2,
    `add_litellm_data_to_request`). A caller without a key (JSON web tokens) is a user."""
    slots = [litellm_params.get(name) for name in ("metadata", "litellm_metadata")]
    both = [slot for slot in slots if isinstance(slot, Mapping)]

    def find(name: str) -> str | None:
        values = (slot.get(f"user_api_key_{name}") for slot in both)
        return next((value for value in values if isinstance(value, str)), None)

    details = [slot.get(f"user_api_key_{part}metadata") for slot in both for part in ("", "team_")]
    tiers = (detail.get("service_tier") for detail in details if isinstance(detail, Mapping))
    tier = next((tier for tier in tiers if isinstance(tier, str)), "")
    team = find("team_id")
    named = (("key", find("hash")), ("user", find("user_id")), ("team", team))
    tenant = next((f"{kind}:{name}" for kind, name in named if name), None)
    share = TIERS.get(tier, 1.0)
    return {"salt": _salt(cache_salt, tenant, team), "tenant": tenant, "share": share}


def _salt(cache_salt: str, tenant: str | None, team: str | None) -> str | None:
    """Requests with one salt share cached prefixes. A key without a team shares with no other key.
    Without keys (a script, a proxy without a master key), all share."""
    if cache_salt == "all":
        return None
    if cache_salt == "team" and team:
        return f"team:{team}"
    return tenant if cache_salt in ("key", "team") else f"fixed:{cache_salt}"


def chosen_by(litellm_params: Mapping[str, Any], model: str) -> Literal["owner", "client"]:
    """`owner`, if the config entry of this call names exactly this model, or there is no router."""
    info = litellm_params.get("model_info") or {}
    if "id" not in info and not litellm_params.get("proxy_server_request"):  # no router's entry
        return "owner"
    return "owner" if info.get(CONFIGURED) == sign(model) else "client"


ENFORCED = [
    f"supports_{ability}"
    for ability in "function_calling parallel_function_calling tool_choice response_schema"
    " system_messages prompt_caching".split()
]
"""Abilities of all models of chat, whatever they were trained for: grammars enforce the formats."""
OWN_CONTEXT = "mlx_context_length"
"""Field of an entry in the map with the model's own context, which no config entry overwrites."""
LIMITS = ("max_tokens", "max_input_tokens", "max_output_tokens")
PRICES = ("input_cost_per_token", "output_cost_per_token")
CACHE_PRICES = ("cache_read_input_token_cost", "cache_creation_input_token_cost")
DEMOS = dict.fromkeys(("demo", "demo-hybrid"), ModelFacts(65_536, vision=True, reasoning=False))


class EngineLimit(int):
    """A limit that an engine's own replaces. All others in `model_info` are from the operator."""


def map_entry(model: str) -> Mapping[str, Any]:
    """LiteLLM's facts about a model; empty: it is not in the map."""
    return litellm.model_cost.get(f"{PROVIDER}/{model}") or {}


def add_to_map(model: str, facts: ModelFacts | Accepted, mode: str = "chat") -> None:
    """Add a model to LiteLLM's map, or new facts about it, with its widest context."""
    before = map_entry(model)
    fields: dict[str, Any] = {}
    if not before:
        fields = {"mode": mode, **dict.fromkeys(ENFORCED, mode == "chat")}
    if (facts.context_length or 0) > (before.get("max_input_tokens") or 0):
        fields |= dict.fromkeys((*LIMITS, OWN_CONTEXT), facts.context_length)
    for name, value in (("vision", facts.vision), ("reasoning", facts.reasoning)):
        if value is not None and before.get(f"supports_{name}") is None:
            fields[f"supports_{name}"] = value
    if fields:
        litellm.register_model({f"{PROVIDER}/{model}": {"litellm_provider": PROVIDER, **fields}})


def set_context_limit(litellm_params: Mapping[str, Any], context_length: int | None) -> None:
    """Write an engine's context into the config entry of a call, not into the map: entries of one
    model can have different engines. Not over a limit of the operator, nor into a wildcard."""
    router = getattr(proxy_server(), "llm_router", None)
    chosen = (litellm_params.get("model_info") or {}).get("id")
    found = router.get_model_info(chosen) if router and isinstance(chosen, str) else None
    if found and context_length and "*" not in found["model_name"]:
        for name in LIMITS[1:]:
            if isinstance(found["model_info"].get(name), EngineLimit | None):
                found["model_info"][name] = EngineLimit(context_length)


def complete_entry(entry: Any) -> None:
    """Add what one of our config entries lacks, and its model as it is before a `*` is replaced."""
    info = entry.model_info
    model = entry.litellm_params.model.removeprefix(PROVIDER + "/")
    found = str(getattr(info, CONFIGURED, ""))
    if found != sign(found.rpartition("#")[0]):
        setattr(info, CONFIGURED, sign(model))
    if all(getattr(info, name, None) == 0 for name in PRICES):
        # As the price of all other tokens; LiteLLM warns of an entry without them.
        _fill(info, CACHE_PRICES, 0.0)
    missing = [name for name in LIMITS[1:] if getattr(info, name, None) is None]
    if "*" in model or not missing:  # LiteLLM makes a new deployment of the entry for each request
        return
    if not map_entry(model):
        local = not entry.litellm_params.api_base  # else its folder is on another machine
        add_to_map(model, facts_of(model, PluginRegistry.discover) if local else ModelFacts())
    length = map_entry(model).get(OWN_CONTEXT)
    with suppress(BadRequest):  # each request reports invalid options
        length = operator_options({"model_info": info.model_dump()}).context_length or length
    if length is not None:
        _fill(info, missing, EngineLimit(length))


def _fill(info: Any, names: Sequence[str], value: Any) -> None:
    for name in names:
        if getattr(info, name, None) is None:
            setattr(info, name, value)
