"""Tiny model folders: loadable, of the right kind, reproducible, and worth testing with."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tiny import FAMILIES, build, family_named

NAMES = [family.name for family in FAMILIES]
PROMPT = [{"role": "user", "content": "Hello there, how are you?"}]


def generated(model: Any, tokens: list[int], count: int) -> list[int]:
    cache = make_prompt_cache(model)
    given, out = mx.array([tokens]), []
    for _ in range(count):
        out.append(int(mx.argmax(model(given, cache=cache)[0, -1])))
        given = mx.array([out[-1:]])
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_mlx_lm_loads_and_generates(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path / name, name)
    model, tokenizer = mlx_lm.load(str(folder))
    assert tuple(type(c).__name__ for c in make_prompt_cache(model)) == family_named(name).caches
    tokens = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True)
    out = generated(model, tokens, 40)
    assert len(set(out)) >= 20
    ended = set(tokenizer.eos_token_ids) | {t for t in out if t >= tokenizer.vocab_size}
    assert not ended & set(out)
    changed = [tokens[0], tokens[-1], *tokens[2:]]
    assert generated(model, changed, 40) != out


@pytest.mark.parametrize("name", ["llama", "rwkv7", "gemma3"])
def test_same_seed_same_files(name: str, tmp_path: Path) -> None:
    folders = [build(tmp_path / str(i), name, seed=i // 2) for i in range(3)]
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    different = {file for file in files[0] if files[0][file] != files[2][file]}
    assert different == {"model.safetensors"}


def test_overrides_reach_the_right_part(tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "gemma3", sliding_window=8, image_size=56, extra=1)
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["sliding_window"] == 8
    assert config["vision_config"]["image_size"] == 56
    assert config["extra"] == 1


def test_special_tokens_can_be_emitted(tmp_path: Path) -> None:
    for emit, rows in ((False, 0), (True, 14)):
        folder = build(tmp_path / str(emit), "qwen3", emit_special=emit)
        head = mx.load(str(folder / "model.safetensors"))["lm_head.weight"]
        special = [*range(8), *range(336, 342)]
        alive = [token for token in special if float(mx.abs(head[token]).sum()) > 0]
        assert len(alive) == rows


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'no_such'.*llama"):
        build(tmp_path / "m", "no_such")
