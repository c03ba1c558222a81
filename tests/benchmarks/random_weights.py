"""Random-weight model folders large enough to be timed."""

from pathlib import Path
from typing import Any

from mlx_provider.errors import BadRequest
from quantised import quantise
from tiny import build

FORMATS = ("float32", "bfloat16", "4bit")
"""`4bit`: quantised in groups of `GROUP`, the rest in bfloat16."""
GROUP = 64
LONGEST = 40_960
QUIET = 0.05
"""Factor on the output rows of tokens that are not printable ASCII."""


def write_model(folder: Path, family: str, form: str, hidden: int, layers: int) -> Path:
    """A text model that any server can load; it answers in printable ASCII and never ends. Raises
    `BadRequest` for what cannot be written."""
    if form not in FORMATS:
        raise BadRequest(f"no such format: {form}; {', '.join(FORMATS)}", param="format")
    dtype = "bfloat16" if form == "4bit" else form
    try:
        path = build(folder, family, dtype=dtype, **_sizes(hidden, layers))
    except ValueError as error:
        raise BadRequest(str(error), param="family") from None
    _speak_ascii(path)
    return quantise(path, family, group=GROUP) if form == "4bit" else path


def _sizes(hidden: int, layers: int) -> dict[str, Any]:
    """`config.json` values for that width and depth, heads of 32 dimensions."""
    heads = max(2, hidden // 32)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "max_position_embeddings": LONGEST,
        # of hybrids
        "full_attention_interval": min(3, layers),
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "mtp_num_hidden_layers": 0,
    }


def _speak_ascii(folder: Path) -> None:
    """Weaken the output rows of other tokens: broken characters would hide equal answers."""
    import mlx.core as mx
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = folder / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    head = next(
        n for end in ("lm_head.weight", "embed_tokens.weight") for n in weights if n.endswith(end)
    )
    texts = [tokenizer.decode([i]) for i in range(weights[head].shape[0])]
    other = [i for i, t in enumerate(texts) if not (t and t.isascii() and t.isprintable())]
    rows = mx.ones((weights[head].shape[0], 1), dtype=weights[head].dtype)
    rows[mx.array(other)] = QUIET
    weights[head] = weights[head] * rows
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
