"""Checks a model folder before a family or a library reads its files."""

from __future__ import annotations

from pathlib import Path

from ..families.checkpoint import read_json
from ..families.config_sizes import check_sizes
from .weight_files import INDEX, extent

DESCRIPTIONS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    INDEX,
)
"""JSON objects that libraries read."""
ADAPTER = "adapter_config.json"


def check_folder(folder: Path, adapter: Path | None = None) -> None:
    """Refuse content that would block or break a reader: deep JSON, layers without weights. Raises
    `BadRequest` that names the file, or `UnsupportedModel` that names the key."""
    for name in DESCRIPTIONS:
        read_json(folder / name)
    check_sizes(read_json(folder / "config.json"), *extent(folder))
    if adapter is not None:
        check_sizes(read_json(adapter / ADAPTER), *extent(folder, adapter))
