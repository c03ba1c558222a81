"""Loads the tokenizer of a checkpoint folder, with its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel
from ...records import LoadOptions
from ..checkpoint import read_json
from .hf_tokenizer import HFTokenizer


def load_tokenizer(folder: Path, options: LoadOptions, nested: Any = None) -> HFTokenizer:
    """`nested`: the tokenizer of a processor, already loaded. Raises `UnsupportedModel` if there is
    no fast form."""
    from transformers import AutoTokenizer

    backend = nested or AutoTokenizer.from_pretrained(
        folder, trust_remote_code=options.trust_remote_code
    )
    if getattr(backend, "backend_tokenizer", None) is None:
        raise UnsupportedModel(f"{folder.name} has no tokenizer.json and none can be made")
    backend.chat_template = _chat_template(folder, backend.chat_template)
    return HFTokenizer(backend)


def _chat_template(folder: Path, own: Any) -> str | Mapping[str, str] | None:
    """The template file next to the weights, else the processor's own, else the tokenizer's."""
    if not (folder / "chat_template.jinja").is_file():
        own = read_json(folder / "chat_template.json").get("chat_template") or own
    return own or None
