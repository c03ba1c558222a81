"""The configuration of a LiteLLM proxy that serves one local model: for a proxy of ours, and as
`config.yaml` and `.env` for one that its operator manages."""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from ..safe_open import create_own
from .proxy import make_key

CONFIG, ENV = "config.yaml", ".env"
TIMEOUT = 3600  # seconds; a prompt of 100,000 tokens may take half of that on a small machine
CLAIMED = (
    "supports_function_calling", "supports_parallel_function_calling", "supports_tool_choice",
    "supports_response_schema", "supports_prompt_caching",
)  # fmt: skip
"""Features of every model: the engine enforces the formats of calls and schemas."""
FREE = {"input_cost_per_token": 0, "output_cost_per_token": 0}
AGENTS = ("claude-*", "gpt-*")  # further names of the model: those that agents ask for
ANYTHING = ("*",)
START = "set -a; . ./.env; set +a; litellm --config config.yaml --host 127.0.0.1"


@dataclass(frozen=True)
class Served:
    name: str
    model: str  # after `mlx/`: a Hub id, the absolute path of a folder, `demo`
    context: int  # tokens
    output: int  # most tokens of a reply
    images: bool = False
    thinks: bool = False
    own_context: int | None = None  # tokens of the checkpoint's own context, if it says so

    @property
    def options(self) -> dict[str, Any]:
        """Fields of `ModelOptions` for the engine."""
        return {} if self.own_context == self.context else {"context_length": self.context}

    def entries(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """The model under its own name and these names, which may contain `*`."""
        params = {
            "model": f"mlx/{self.model}",
            "max_tokens": self.output,
            "timeout": TIMEOUT,
            "stream_timeout": TIMEOUT,
        }
        info: dict[str, Any] = {
            "mode": "chat",
            "max_input_tokens": self.context,
            "max_output_tokens": self.output,
            **FREE,
            **dict.fromkeys(CLAIMED, True),
            "supports_vision": self.images,
            "supports_reasoning": self.thinks,
            **({"mlx": self.options} if self.options else {}),
        }
        entry = {"litellm_params": params, "model_info": info}
        return [{"model_name": name, **deepcopy(entry)} for name in (self.name, *names)]


def served_config(served: Served, names: tuple[str, ...], forwards: str = "") -> dict[str, Any]:
    """The config of a proxy with `served` under its own name and `names`. `forwards`: another
    provider's models, in an entry of their own. A client of theirs sends the proxy's key as
    `x-litellm-api-key`. LiteLLM passes on the token of the client's login (1.106.2,
    `clean_headers`), else it takes the provider's key from the environment."""
    config = {
        "model_list": served.entries(names),
        **_settings({"sse_keepalive_ping_interval_seconds": 10}),
    }
    if forwards:
        entry = {"model_name": forwards.partition("/")[2], "litellm_params": {"model": forwards}}
        config["model_list"].append(entry)
        config["general_settings"]["forward_client_headers_to_llm_api"] = True
    return config


def proxy_config(name: str, model: str, **litellm_params: Any) -> dict[str, Any]:
    """The config of a proxy with a model whose sizes are not known, for demos and checks."""
    info = {"mode": "chat", **FREE, "supports_function_calling": True}
    params = {"model": f"mlx/{model}", **litellm_params}
    entry = {"model_name": name, "litellm_params": params, "model_info": info}
    return {"model_list": [entry], **_settings({})}


def _settings(litellm: Mapping[str, Any]) -> dict[str, Any]:
    provider = {"provider": "mlx", "custom_handler": "mlx_provider.litellm.handler"}
    return {
        "litellm_settings": {"custom_provider_map": [provider], **litellm},
        "general_settings": {"cancel_on_disconnect": True, "disable_spend_logs": True},
        "router_settings": {"num_retries": 0},
    }


def write_config(config: Mapping[str, Any], folder: Path) -> Path:
    """Write `config.yaml`, which only this user can read, and return its path."""
    path = folder / CONFIG
    with os.fdopen(create_own(path), "w") as file:
        file.write(json.dumps(config, indent=2) + "\n")  # is valid YAML
    return path


def config_text(served: Served) -> str:
    import yaml

    config = served_config(served, AGENTS)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=1000)
    return f"# A LiteLLM proxy for a local model. Start it: {START}\n{text}"


def env_text() -> str:
    return f"""\
LITELLM_MASTER_KEY={make_key()}
# Otherwise each start downloads a price list.
LITELLM_LOCAL_MODEL_COST_MAP=True
# Seconds; default 5. With --num_workers, uvicorn kills a worker that imports for longer.
TIMEOUT_WORKER_HEALTHCHECK=60
"""


def write_pair(folder: Path, served: Served, *, force: bool) -> list[Path]:
    """Write `.env`, which only this user can read, and `config.yaml`. Returns their paths. Raises
    `BadRequest` if one exists (not with `force`) or cannot be written."""
    contents = {folder / ENV: env_text(), folder / CONFIG: config_text(served)}
    there = [str(path) for path in contents if path.exists() or path.is_symlink()]
    if there and not force:
        raise BadRequest(f"{' and '.join(there)} would be overwritten: add --force to allow it")
    for path, content in contents.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # a new file, so that no process holds the old one open
            with os.fdopen(create_own(path), "w", encoding="utf-8") as file:
                file.write(content)
            if path.name != ENV:
                path.chmod(0o644)
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}") from None
    return [*contents]
