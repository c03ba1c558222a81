"""Parts for tests of plugins.

| module | content |
|---|---|
| `conformance` | the checks of `pytest --mlx-conformance NAME` |
| `scripted` | a model that says and calls what the user's message tells it |
| `driver` | an engine without threads, and plain greedy decoding |

A family needs a checkpoint of its architecture; `demo_checkpoint` writes one that speaks."""

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
    """The words of the demo model as a checkpoint in float32 of the type `qwen3` (mlx-lm's names).
    `config` replaces entries of `config.json`: `model_type`, to load it as another architecture
    with the same weights."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer", "tokenizer_config", "generation_config"):
        shutil.copy(DEMO / f"{name}.json", folder)
    shutil.copy(DEMO / "chat_template.jinja", folder)
    whole = json.loads((DEMO / "config.json").read_text("utf-8"))
    ends = {name: whole[name] for name in ("eos_token_id", "pad_token_id")}
    words = {name: value for name, value in whole["text_config"].items() if name[:4] != "rope"}
    rope = {"rope_type": "default", "rope_theta": whole["text_config"]["rope_theta"]}
    own = {"model_type": "qwen3", "rope_parameters": rope, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(words | ends | own | config))
    weights: Any = mx.load(str(DEMO / "model.safetensors"))
    own_weights = {
        name.replace("language_model.", ""): value.astype(mx.float32)
        for name, value in weights.items()
        if "language_model." in name
    }
    mx.save_safetensors(str(folder / "model.safetensors"), own_weights, metadata={"format": "mlx"})
    return folder


def read_chunks(chunks: Iterable[str], **formats: Any) -> WholeReply:
    """A reply that comes in these pieces, as a client puts it together. `formats`: `tool_parser`,
    `tools`, `reasoning_parser`, `reasoning_open`."""
    from ..chat.output import whole_reply

    return whole_reply.read_chunks(chunks, **formats)
