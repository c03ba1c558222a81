"""Options of the operator for one model."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..bounds import MAX_WARM, Messages, Tools
from .wire_model import MOST_SECONDS, MOST_TOKENS, Asked

log = logging.getLogger(__name__)

OWNERS_ALONE = frozenset(
    {
        "adapter",
        "allow_media",
        "draft_model",
        "dtype",
        "extra",
        "keep_alive",
        "modality",
        "trust_remote_code",
    }
)
"""Options that run code, read files, reach hosts, need separate weights or displace others': never
set by another machine."""
NAMED_KEYS = frozenset({"context_length", "on_ignored_params"})
"""Options for requests with a named key. Others make more work or need another engine."""

REMOVED = {
    "draft_tokens": "a drafter proposes as many tokens as pay, at most 7",
    "kv_group_size": "64 values share a scale, or 32 where the heads need it",
    "sparse_prefill_from": "a prompt is long from 8192 tokens on",
}
"""Removed options, with what replaces them."""
RENAMED = {
    "ignored": ("on_ignored_params", {"tell": "tell"}),
    "unseen_media": ("on_ignored_params", {"omit": "tell"}),
}
"""Old name, new name, renamed values."""


ALLOWED_MEDIA = {"allow_private_media": "private", "allow_file_media": "file"}
"""Old options that are now values of `allow_media`."""


class WarmPrompt(Asked):
    messages: Messages
    tools: Tools = Field(default_factory=list)


class ModelOptions(Asked):
    """From the config entry's `model_info`. A client cannot set them."""

    model_config = ConfigDict(allow_inf_nan=False)

    adapter: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = Field(None, gt=0, le=MOST_TOKENS)
    kv_bits: Literal[4, 8] | None = None
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights in memory; `native`: as in the checkpoint; `auto`: the same, but float32 on a
    CPU if that fits into memory."""
    reproducible: bool = False
    """Passes have a fixed size, so that a request gives the same tokens in any batch."""
    modality: Literal["auto", "text"] = "auto"
    """`text`: without the vision tower."""
    on_ignored_params: Literal["tell", "refuse"] | None = None
    """For parts without effect (parameters, or images that the model cannot take): warn or refuse.
    `None`: `tell`, but images are refused if `modality` is `text`."""
    keep_alive: float | None = Field(None, ge=-1, le=MOST_SECONDS)
    """Seconds without a request until the model is unloaded; -1: never; `None`: when another model
    needs the memory."""
    drafter: str = "auto"
    """A name; `auto`: all that support the model; `off`: none."""
    draft_model: str | None = None
    """Folder of a smaller model with the same vocabulary, for the drafter `model`."""
    sparse_prefill: float | None = Field(None, ge=0.1, le=0.9)
    """Share of a long prompt's tokens that is prefilled: the most important by the draft model;
    `None`: all."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    """Needed if the checkpoint does not say how states become a vector."""
    allow_media: list[Literal["private", "file"]] = Field(default_factory=list)
    """Beside public addresses: `private` addresses, and files of the engine's machine (`file`)."""
    warm: list[str | WarmPrompt] = Field(default_factory=list, max_length=MAX_WARM)
    """Prefilled before a tenant's first request. A text is a system prompt."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to a third-party family's `load`."""

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, given: Any) -> Any:
        """Accept old names. Refuse a removed option with its replacement."""
        if not isinstance(given, dict):
            return given
        for name in REMOVED.keys() & given.keys():
            raise PydanticCustomError("removed", "{name} is gone, leave it out: {instead}", {
                "name": name, "instead": REMOVED[name],
            })  # fmt: skip
        for name in RENAMED.keys() & given.keys():
            new, values = RENAMED[name]
            value = given[name]
            given = {key: each for key, each in given.items() if key != name}
            if given.get(new) != "refuse":
                given[new] = values.get(value, value) if isinstance(value, str) else value
            _tell_renamed(name, new)
        for name, source in ALLOWED_MEDIA.items():
            allowed = given.get("allow_media", [])
            # a value of another type is refused
            if isinstance(given.get(name), bool) and isinstance(allowed, list):
                granted = [source] if given[name] else []
                given = {key: each for key, each in given.items() if key != name}
                given["allow_media"] = [*allowed, *granted]
                _tell_renamed(name, f"allow_media: [{source}]")
        return given


@cache
def _tell_renamed(old: str, new: str) -> None:
    log.warning("the option %s is now %s; the old name ends with the next minor version", old, new)


class OperatorOptions(ModelOptions):
    """Options of a config entry, for engine and gateway."""

    cache_salt: str = "key"
    """Who shares cached prompts: `key`, `team`, `all`, or all entries with this text."""
    heartbeat: float = Field(5.0, ge=0, le=MOST_SECONDS)
    """Seconds of silence before a heartbeat; `0`: never."""
