"""Tiny embedding models, as sentence-transformers leaves them, from folders of `build`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}
ENDS = "<|endoftext|>"
"""What the tokenizer puts behind every text."""


def as_embedding(
    folder: Path,
    mode: str = "lasttoken",
    *,
    normalise: bool = True,
    others: tuple[str, ...] = (),
    prompts: Mapping[str, str] = PROMPTS,
    default_prompt: str | None = None,
) -> Path:
    """Make a folder of the dialect QWEN say how it embeds: by the pooling `mode`, and `others`,
    modules that follow it."""
    classes = ["Transformer", "Pooling", *others, *(["Normalize"] if normalise else [])]
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "", "type": f"st.{name}"}
        for at, name in enumerate(classes)
    ]
    _write(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{each}": each == mode for each in modes}
    _write(folder / "1_Pooling" / "config.json", {"include_prompt": True, **pooling})
    sentences = {"prompts": dict(prompts), "default_prompt_name": default_prompt}
    _write(folder / "config_sentence_transformers.json", sentences)
    _end_texts(folder / "tokenizer.json")
    return folder


def without_head(folder: Path) -> Path:
    """Leave in a folder the backbone, under its own names, without the output matrix."""
    import mlx.core as mx

    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    assert isinstance(weights, dict)
    kept = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
    mx.eval(kept)
    mx.save_safetensors(path, kept, metadata={"format": "pt"})
    return folder


def _end_texts(path: Path) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {ENDS}", special_tokens=[(ENDS, tokenizer.token_to_id(ENDS))]
    )
    tokenizer.save(str(path))


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))
