"""What the operator of the gateway decides: the config entry's `model_info`, never a client.

`optional_params` would not do: there a client's body overrides the config's values. Options stand
in `model_info` as a mapping `mlx: {kv_bits: 8}` or flat as `mlx_kv_bits: 8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..errors import BadRequest
from ..protocol import ModelOptions

FLAT = "mlx_"


def model_options(litellm_params: Mapping[str, Any]) -> ModelOptions:
    """The options of this config entry; without any, the safe defaults.

    Raises `BadRequest` that names the option and its range.
    """
    info = litellm_params.get("model_info") or {}
    nested = info.get("mlx") or {}
    if not isinstance(nested, Mapping):
        raise BadRequest("model_info.mlx must be a mapping", param="model_info.mlx")
    flat = {name[len(FLAT) :]: info[name] for name in info if name.startswith(FLAT)}
    try:
        return ModelOptions.model_validate({**flat, **nested})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(["model_info.mlx", *map(str, first["loc"])])
        raise BadRequest(f"{name}: {first['msg']}", param=name) from None


def tenant(options: ModelOptions, litellm_params: Mapping[str, Any]) -> str | None:
    """The namespace of the prefix store for this caller; `None`: shared by all.

    `cache_salt: key` separates the gateway's keys, `team` its teams (a key without a team
    stays alone), any other text is a fixed namespace of this config entry.
    """
    metadata = litellm_params.get("metadata") or litellm_params.get("litellm_metadata") or {}
    key = metadata.get("user_api_key_hash") or metadata.get("user_api_key") or ""
    team = metadata.get("user_api_key_team_id")
    if options.cache_salt == "team" and team:
        return f"team:{team}"
    if options.cache_salt in ("key", "team"):
        return f"key:{key}"
    return f"fixed:{options.cache_salt}" if options.cache_salt else None
