"""The README's configuration is one that works."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from mlx_provider.litellm.operator import operator_options

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks() -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)]


def test_the_config_names_our_handler_and_prefix() -> None:
    config = blocks()[0]
    (provider,) = config["litellm_settings"]["custom_provider_map"]
    module, _, name = provider["custom_handler"].rpartition(".")
    assert getattr(import_module(module), name)
    for entry in config["model_list"]:
        assert entry["litellm_params"]["model"].startswith(provider["provider"] + "/")


def test_the_operators_options_are_valid() -> None:
    options = operator_options(blocks()[1])
    assert (options.kv_bits, options.cache_salt) == (8, "team")
