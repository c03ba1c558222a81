"""The tokenizer nested in a processor, with the processor's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModel
from ..records import LoadOptions, ModelInfo
from .checkpoint import DEFAULT_CONTEXT, context_length, describe, read_json
from .dialect import refuses_late_system, shows_tool_media
from .hf_tokenizer import HFTokenizer
from .mlx_vlm import vocab_size, weights_bytes


def load_tokenizer(folder: Path, options: LoadOptions, nested: Any = None) -> HFTokenizer:
    """The folder's tokenizer; `nested`: a processor's, already loaded.

    Raises `UnsupportedModel` where it has no fast form.
    """
    from transformers import AutoTokenizer

    backend = nested or AutoTokenizer.from_pretrained(
        folder, trust_remote_code=options.trust_remote_code
    )
    if getattr(backend, "backend_tokenizer", None) is None:
        raise UnsupportedModel(f"{folder.name} has no tokenizer.json and none can be made")
    backend.chat_template = _chat_template(folder, backend.chat_template)
    return HFTokenizer(backend)


def _chat_template(folder: Path, own: Any) -> str | None:
    """The template file next to the weights, else the processor's own, else the tokenizer's."""
    if isinstance(own, Mapping):
        own = own.get("default")
    if not (folder / "chat_template.jinja").is_file():
        own = read_json(folder / "chat_template.json").get("chat_template") or own
    return own or None


def vision_info(
    folder: Path,
    options: LoadOptions,
    model: Any,
    tokenizer: HFTokenizer,
    *,
    media: tuple[str, ...],
    pixels: tuple[int, int],
    image: str,
    variant: str = "",
    default_context: int = DEFAULT_CONTEXT,
    notes: tuple[str, ...] | None = None,
) -> ModelInfo:
    """`ModelInfo` of a vision model. `image`: what its template writes for one; `variant`: what
    besides its files changes its KV.

    `default_context`: the context length where config and operator name none. `notes`: in place
    of the tokenizer's.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    # `n_ctx` is the last name looked for
    context = context_length({"n_ctx": default_context, **text}, options)
    info = describe(
        folder,
        config,
        model,
        tokenizer,
        options,
        vocab_size=vocab_size(model.language_model),
        weights_bytes=weights_bytes(model),
        media=frozenset(media),
        min_pixels=pixels[0] if media else 0,
        max_pixels=pixels[1] if media else 0,
        hoist_system=refuses_late_system(tokenizer),
        tool_media="image" in media and shows_tool_media(tokenizer, image),
        context_length=context,
        notes=tokenizer.notes if notes is None else notes,
    )
    return replace(info, fingerprint=info.fingerprint + variant)
