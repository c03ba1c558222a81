"""Tries a folder's chat template before the engine thread loads the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import named_template, read_json
from .dialect import dialect
from .hf_tokenizer import HFTokenizer

FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class _Described:
    """The part of a transformers tokenizer that a template needs, from the files alone."""

    chat_template: str
    special_tokens_map: Mapping[str, str]


def try_template(folder: Path) -> None:
    """Run the probes of a template, so that the load finds their results. Blocks for some seconds.
    A wrong guess of the special tokens costs only time: the load then probes again. Raises
    `UnsupportedModel` for a template that exceeds its limits."""
    source = named_template(folder)
    if source:
        dialect(HFTokenizer(_Described(source, _special_tokens(folder))))


def _special_tokens(folder: Path) -> dict[str, str]:
    """Like `special_tokens_map` of transformers: `bos_token` and others, as text."""
    found: dict[str, str] = {}
    for name in FILES:
        given = read_json(folder / name)
        own = given.get("extra_special_tokens")
        named = {key: value for key, value in given.items() if key.endswith("_token")}
        for key, value in (named | (own if isinstance(own, dict) else {})).items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found
