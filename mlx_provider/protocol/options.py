"""What an operator sets for one model."""

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
"""Model options that run code, read files, reach hosts, make other weights or keep others' out of
memory: never another machine's to set."""


REMOVED = {
    "draft_tokens": "a drafter proposes as many tokens as pay, at most 7",
    "kv_group_size": "64 values share a scale, or 32 where the heads need it",
    "sparse_prefill_from": "a prompt is long from 8192 tokens on",
}
"""Options of earlier versions, with what holds without them."""
RENAMED = {
    "ignored": ("on_ignored_params", {"tell": "tell"}),
    "unseen_media": ("on_ignored_params", {"omit": "tell"}),
}
"""Old name, new name, and values that have another name."""


ALLOWED_MEDIA = {"allow_private_media": "private", "allow_file_media": "file"}
"""Old names of options that are values of `allow_media` now."""


class WarmPrompt(Asked):
    """A beginning that many requests will share."""

    messages: Messages
    tools: Tools = Field(default_factory=list)


class ModelOptions(Asked):
    """What only the operator sets, from the config entry's `model_info`; never a client."""

    model_config = ConfigDict(allow_inf_nan=False)

    adapter: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = Field(None, gt=0, le=MOST_TOKENS)
    kv_bits: Literal[4, 8] | None = None
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights in memory; `native`: the checkpoint's; `auto`: that, but float32 on a CPU
    where it fits into memory."""
    reproducible: bool = False
    """Every pass has one size, so that a request gives the same tokens in any company."""
    modality: Literal["auto", "text"] = "auto"
    """`text`: serve a model that sees without the weights that see."""
    on_ignored_params: Literal["tell", "refuse"] | None = None
    """What becomes of a request with parts that have no effect: parameters, and images that the
    model cannot see. `None`: `tell`, but images are refused where `modality` is `text`."""
    keep_alive: float | None = Field(None, ge=-1, le=MOST_SECONDS)
    """Seconds without a request after which its weights leave memory; -1: they stay, whatever
    other models need; `None`: they leave when another model needs their room."""
    drafter: str = "auto"
    """Who guesses tokens ahead: a name; `auto`: all that can; `off`: nobody."""
    draft_model: str | None = None
    """Folder of a smaller model of the same vocabulary, for the drafter `model`."""
    sparse_prefill: float | None = Field(None, ge=0.1, le=0.9)
    """Share of a long prompt's tokens that is computed, those that the draft model finds to matter;
    `None`: all."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    """Which states of a text make its vector, where the checkpoint does not say."""
    allow_media: list[Literal["private", "file"]] = Field(default_factory=list)
    """Images that a request may name, apart from public addresses: `private` addresses, and files
    of the engine's machine."""
    warm: list[str | WarmPrompt] = Field(default_factory=list, max_length=MAX_WARM)
    """Prompts to prefill before a tenant's first request; a text is a system prompt."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Options of a third-party family, passed to its `load` untouched."""

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, given: Any) -> Any:
        """Take a renamed option by its old name; refuse a removed one with its remedy."""
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
            # a value of another type is refused, and grants nothing
            if isinstance(given.get(name), bool) and isinstance(allowed, list):
                granted = [source] if given[name] else []
                given = {key: each for key, each in given.items() if key != name}
                given["allow_media"] = [*allowed, *granted]
                _tell_renamed(name, f"allow_media: [{source}]")
        return given


@cache
def _tell_renamed(old: str, new: str) -> None:
    """Once in a process."""
    log.warning("the option %s is now %s; the old name ends with the next minor version", old, new)
