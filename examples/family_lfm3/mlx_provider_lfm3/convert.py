"""A checkpoint of transformers as one that takes less memory and loads without a conversion.

`python -m mlx_provider_lfm3.convert FOLDER NEW_FOLDER --bits 4`: mlx-lm's own `convert` asks
mlx-lm for the model's class, which has none.
"""

import argparse
from pathlib import Path

from mlx_lm.utils import load_model, load_tokenizer, quantize_model, save

from .model import Model, ModelArgs


def convert(source: Path, target: Path, bits: int | None = None, group: int = 64) -> Path:
    """Write `target`; `bits`: quantised, with one scale for every `group` weights.

    Raises `FileExistsError` where `target` has something in it.
    """
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    model, config = load_model(
        source, lazy=True, get_model_classes=lambda config: (Model, ModelArgs)
    )
    if bits is not None:
        model, config = quantize_model(model, config, group, bits)
    save(target, str(source), model, load_tokenizer(source), config)
    return target


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("source", type=Path)
    asked.add_argument("target", type=Path)
    asked.add_argument("--bits", type=int)
    asked.add_argument("--group", type=int, default=64)
    told = asked.parse_args()
    print(convert(told.source, told.target, told.bits, told.group))
