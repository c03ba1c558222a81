"""Parts for tests of plugins.

| module | content |
|---|---|
| `conformance` | the checks of `pytest --mlx-conformance NAME` |
| `scripted` | a model that says and calls what the user's message tells it |
| `driver` | an engine without threads: submit requests, step it, read their tokens |

`demo_checkpoint` writes a small trained checkpoint, with which a family can be tested.
`read_chunks` reads a reply with the parsers under test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..chat.output.whole_reply import WholeReply

DEMO, HYBRID = (Path(__file__).parents[1] / "demo" / name for name in ("model", "hybrid"))
"""Folders of the small trained models in the wheel: a Qwen3-VL, and a Qwen3.5 with an MTP head."""


def demo_checkpoint(folder: Path, **config: Any) -> Path:
    """Write the language model of `DEMO` into `folder` as a float32 checkpoint of the type `qwen3`,
    with mlx-lm's names of weights, and return `folder`. `config` replaces entries of `config.json`:
    with another `model_type`, the same weights load as another architecture."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer", "tokenizer_config", "generation_config"):
        shutil.copy(DEMO / f"{name}.json", folder)
    shutil.copy(DEMO / "chat_template.jinja", folder)
    demo = json.loads((DEMO / "config.json").read_text("utf-8"))
    token_ids = {name: demo[name] for name in ("eos_token_id", "pad_token_id")}
    text = {name: value for name, value in demo["text_config"].items() if name[:4] != "rope"}
    rope = {"rope_type": "default", "rope_theta": demo["text_config"]["rope_theta"]}
    own = {"model_type": "qwen3", "rope_parameters": rope, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(text | token_ids | own | config))
    weights: Any = mx.load(str(DEMO / "model.safetensors"))
    text_weights = {
        name.replace("language_model.", ""): value.astype(mx.float32)
        for name, value in weights.items()
        if "language_model." in name
    }
    mx.save_safetensors(str(folder / "model.safetensors"), text_weights, metadata={"format": "mlx"})
    return folder


def read_chunks(chunks: Iterable[str], **formats: Any) -> WholeReply:
    """Read a reply that comes in these pieces, and put it together as a client does. `formats`:
    `tool_parser`, `tools`, `reasoning_parser`, and `reasoning_open`: whether the prompt ended in a
    thought (`None`: unknown)."""
    from ..chat.output import whole_reply

    return whole_reply.read_chunks(chunks, **formats)
