"""What an operator sets for one model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from ..bounds import MAX_WARM, Messages, Tools
from .wire_model import MOST_SECONDS, MOST_TOKENS, Asked

OWNERS_ALONE = frozenset(
    {
        "adapter",
        "allow_file_media",
        "allow_private_media",
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
    kv_group_size: Literal[32, 64, 128] = 64
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights in memory; `native`: the checkpoint's; `auto`: that, but float32 on a CPU
    where it fits into memory."""
    reproducible: bool = False
    """Every pass has one size, so that a request gives the same tokens in any company."""
    modality: Literal["auto", "text"] = "auto"
    """`text`: serve a model that sees without the weights that see."""
    unseen_media: Literal["omit", "refuse"] | None = None
    """What becomes of images that the model cannot see; `None`: `refuse` where `modality` is
    `text`, else `omit`."""
    keep_alive: float | None = Field(None, ge=-1, le=MOST_SECONDS)
    """Seconds without a request after which its weights leave memory; -1: they stay, whatever
    other models need; `None`: they leave when another model needs their room."""
    drafter: str = "auto"
    """Who guesses tokens ahead: a name; `auto`: the best that can; `off`: nobody."""
    draft_model: str | None = None
    """Folder of a smaller model of the same vocabulary, for the drafter `model`."""
    draft_tokens: int | None = Field(None, ge=1, le=7)
    """Tokens that are guessed ahead at most."""
    sparse_prefill: float | None = Field(None, ge=0.1, le=0.9)
    """Share of a long prompt's tokens that is computed, those that the draft model finds to matter;
    `None`: all."""
    sparse_prefill_from: int = Field(8192, ge=256)
    """Tokens from which on a prompt is long."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    """Which states of a text make its vector, where the checkpoint does not say."""
    allow_private_media: bool = False
    allow_file_media: bool = False
    warm: list[str | WarmPrompt] = Field(default_factory=list, max_length=MAX_WARM)
    """Prompts to prefill before a tenant's first request; a text is a system prompt."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Options of a third-party family, passed to its `load` untouched."""
