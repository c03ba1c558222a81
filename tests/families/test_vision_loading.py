"""Detection, checkpoints with odd contents, and what is known of a loaded model."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from greedy import features_of, greedy, start
from mlx_provider import BadRequest, LoadOptions, MediaError
from python_process import run_python
from tiny import build
from tiny.models import tiny_image

from .conftest import PLUGINS, family_of

ALL = ["qwen3_vl", "qwen3_5", "gemma3"]


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / folder.name))


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", list(PLUGINS))
def test_only_own_checkpoints_with_vision_match(name: str, folders) -> None:
    config = json.loads((folders(name) / "config.json").read_text())
    for plugin in set(PLUGINS.values()):
        expected = 10 if plugin == PLUGINS[name] else 0
        assert family_of(plugin).matches(config) == expected
    text_only = {k: v for k, v in config.items() if k != "vision_config"}
    named = text_only | {"model_type": "llama", "_name_or_path": f"org/{name}-VL-vision"}
    for plugin in PLUGINS.values():
        assert family_of(plugin).matches(text_only) == 0
        assert family_of(plugin).matches(named) == 0


@pytest.mark.parametrize("name", ALL)
def test_the_info_of_a_model_has_sizes_media_and_stop_tokens(name: str, load, folders) -> None:
    info = load(name).info
    fast = load(name).tokenizer.fast
    assert info.model_type == name
    assert info.vocab_size == 384
    assert info.context_length == 32768
    assert info.precision == "float32"
    assert "image" in info.media
    assert 0 < info.min_pixels <= info.max_pixels
    size = (folders(name) / "model.safetensors").stat().st_size
    assert 0.7 * size < info.weights_bytes <= size  # a head for drafts is not loaded
    ends = ("<end_of_turn>", "<eos>") if name == "gemma3" else ("<|im_end|>", "<|endoftext|>")
    assert info.stop_tokens == {fast.token_to_id(text) for text in ends}


@pytest.mark.parametrize("name", ALL)
def test_stop_tokens_come_from_every_source(name: str, folders, tmp_path: Path) -> None:
    folder = copied(folders(name), tmp_path)
    rewrite(folder, eos_token_id=300)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [301, 302]}))
    model = family_of(PLUGINS[name]).load(folder, LoadOptions())
    end = "<end_of_turn>" if name == "gemma3" else "<|im_end|>"
    assert model.info.stop_tokens == {300, 301, 302, model.tokenizer.fast.token_to_id(end)}


def test_sampling_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    folder = build(tmp_path / "m", "qwen3_vl", generation=generation)
    sampling = family_of(PLUGINS["qwen3_vl"]).load(folder, LoadOptions()).info.sampling
    assert {k: v for k, v in vars(sampling).items() if v is not None} == generation


def test_weights_of_mtp_heads_are_skipped(folders, load, tmp_path: Path, ask, monkeypatch) -> None:
    """A checkpoint with an MTP head: opened once, its head never in memory, same answers."""
    opened: list[str] = []
    original = mx.load
    monkeypatch.setattr(mx, "load", lambda path, *a, **k: opened.append(path) or original(path))
    weights = original(str(folders("qwen3_5") / "model.safetensors"))
    assert any(key.startswith("mtp.") for key in weights)
    model = family_of(PLUGINS["qwen3_5"]).load(folders("qwen3_5"), LoadOptions())
    assert len(opened) == 1
    mtp = sum(v.nbytes for k, v in weights.items() if k.startswith("mtp."))
    total = sum(v.nbytes for v in weights.values())
    assert model.info.weights_bytes == total - mtp
    bare = copied(folders("qwen3_5"), tmp_path)
    kept = {k: v for k, v in weights.items() if not k.startswith("mtp.")}
    mx.save_safetensors(str(bare / "model.safetensors"), kept, metadata={"format": "mlx"})
    without = family_of(PLUGINS["qwen3_5"]).load(bare, LoadOptions())
    prompt = ask(model, "Hello", tiny_image(1))
    assert greedy(model, prompt, 8) == greedy(without, prompt, 8)


@pytest.mark.parametrize("name", ALL)
def test_a_checkpoint_without_its_tower_is_a_text_model(
    name: str, folders, load, ask, tmp_path: Path
) -> None:
    folder = copied(folders(name), tmp_path)
    path = str(folder / "model.safetensors")
    kept = {k: v for k, v in mx.load(path).items() if k.startswith("language_model.")}
    mx.eval(list(kept.values()))
    mx.save_safetensors(path, kept, metadata={"format": "mlx"})
    for extra in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / extra).unlink(missing_ok=True)
    model = family_of(PLUGINS[name]).load(folder, LoadOptions())
    assert model.info.media == frozenset()
    assert model.info.max_pixels == 0
    prompt = ask(model, "Hello")
    assert greedy(model, prompt, 8) == greedy(load(name), prompt, 8)
    with pytest.raises(BadRequest):
        ask(model, "Hello", tiny_image(1))
    with pytest.raises(MediaError, match="no vision weights"):
        model.media_format.expand(tiny_image(1))


def quantised(folder: Path, *, head: str) -> None:
    """Write a language model in 4 bits. `head`: tied, as mlx-lm writes Gemma, plain or 4 bits."""
    import mlx_vlm

    model, _ = mlx_vlm.load(str(folder))

    def chosen(path: str, module: Any) -> bool:
        plain = head == "plain" and "lm_head" in path
        return path.startswith("language_model") and hasattr(module, "to_quantized") and not plain

    nn.quantize(model, group_size=32, bits=4, class_predicate=chosen)
    weights = dict(tree_flatten(model.parameters()))
    if head == "tied":
        weights = {k: v for k, v in weights.items() if "lm_head" not in k}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    rewrite(folder, quantization={"group_size": 32, "bits": 4})


@pytest.mark.parametrize(
    ("name", "head"), [*((name, "4 bits") for name in ALL), ("gemma3", "tied"), ("gemma3", "plain")]
)
def test_a_quantised_vision_model_generates(
    name: str, head: str, folders, ask, tmp_path: Path
) -> None:
    folder = copied(folders(name), tmp_path)
    quantised(folder, head=head)
    model = family_of(PLUGINS[name]).load(folder, LoadOptions())
    assert model.info.precision == "low"
    assert model.info.vocab_size == 384
    prompt = ask(model, "Hello", tiny_image(1))
    assert len(greedy(model, prompt, 4, chunk=7)) == 4


@pytest.mark.parametrize("name", ALL)
def test_quantised_kv_changes_logits_only_a_little(name: str, ask, tmp_path: Path) -> None:
    """Plain KV of a finished prefill may be quantised; the answer moves only a little."""
    wide = {"qwen3_vl": {"rope_scaling": {"mrope_section": [8, 4, 4], "rope_type": "default"}}}
    folder = build(tmp_path / "m", name, head_dim=32, **wide.get(name, {}))
    model = family_of(PLUGINS[name]).load(folder, LoadOptions())
    prompt = ask(model, "Hello", tiny_image(1))
    exact, coarse = start(model, prompt), start(model, prompt)
    cache = [
        entry.to_quantized(group_size=32, bits=8) if isinstance(entry, KVCache) else entry
        for entry in coarse.cache
    ]
    assert any(isinstance(entry, QuantizedKVCache) for entry in cache)
    token = mx.argmax(exact.logits, keepdims=True).astype(mx.int32)
    position = mx.array([exact.position])
    near, true = (model.decode(token, entries, position)[0] for entries in (cache, exact.cache))
    assert 0 < float(mx.abs(near - true).max()) < 0.2


def test_the_dtype_option_sets_the_precision_of_image_features(folders, ask) -> None:
    model = family_of(PLUGINS["qwen3_vl"]).load(folders("qwen3_vl"), LoadOptions(dtype="bfloat16"))
    assert model.info.precision == "low"
    prompt = ask(model, "Hello", tiny_image(1))
    (features,) = features_of(model, prompt).values()
    assert features.rows.dtype == mx.bfloat16
    assert features.nbytes == 9 * 64 * 2 * 3


def test_the_fingerprint_depends_on_weights_and_dtype(folders, load, tmp_path: Path) -> None:
    plain = load("qwen3_vl").info.fingerprint
    family = family_of(PLUGINS["qwen3_vl"])
    assert family.load(folders("qwen3_vl"), LoadOptions()).info.fingerprint == plain
    assert family.load(folders("qwen3_vl"), LoadOptions(dtype="float16")).info.fingerprint != plain
    other = build(tmp_path / "other", "qwen3_vl", seed=1)
    assert family.load(other, LoadOptions()).info.fingerprint != plain


def test_incomplete_misfitting_or_untrusted_weights_are_refused(folders, tmp_path: Path) -> None:
    family = family_of(PLUGINS["qwen3_vl"])
    empty = copied(folders("qwen3_vl"), tmp_path)
    (empty / "model.safetensors").unlink()
    with pytest.raises(BadRequest, match="not a complete"):
        family.load(empty, LoadOptions())
    (tmp_path / "b").mkdir()
    misfit = copied(folders("qwen3_vl"), tmp_path / "b")
    config = json.loads((misfit / "config.json").read_text())
    rewrite(misfit, text_config=config["text_config"] | {"num_hidden_layers": 9})
    with pytest.raises(BadRequest, match="do not fit"):
        family.load(misfit, LoadOptions())
    rewrite(misfit, model_file="evil.py")
    with pytest.raises(BadRequest, match="trust_remote_code"):
        family.load(misfit, LoadOptions())


LOADED = (
    "mlx_provider_gemma3.model",
    "mlx_provider.families.caches",
    "mlx_provider.families.text",
    "mlx_provider_qwen3_vl.model",
)


@pytest.mark.parametrize(
    "module", [*LOADED[:2], *(pytest.param(each, marks=pytest.mark.sweep) for each in LOADED[2:])]
)
def test_importing_the_packages_leaves_the_limit_of_open_files_unchanged(module: str) -> None:
    code = (
        "import resource\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        f"import {module}, mlx_lm.utils\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64\n"
    )
    run_python(code)


def adapter_for(folder: Path, to: Path) -> Path:
    """A LoRA adapter whose every matrix is random."""
    import mlx_vlm

    to.mkdir()
    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (to / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(to / "adapters.safetensors"), {})
    model, _ = mlx_vlm.load(str(folder), adapter_path=str(to))
    names = [k for k, _ in tree_flatten(model.parameters()) if "lora" in k]
    shapes = dict(tree_flatten(model.parameters()))
    weights = {k: mx.full(shapes[k].shape, 0.05) for k in names}
    mx.save_safetensors(str(to / "adapters.safetensors"), weights)
    return to


def test_an_adapter_changes_logits_and_must_exist(folders, load, ask, tmp_path: Path) -> None:
    family, folder = family_of(PLUGINS["qwen3_vl"]), folders("qwen3_vl")
    adapter = adapter_for(folder, tmp_path / "adapter")
    model = family.load(folder, LoadOptions(adapter=adapter))
    plain = load("qwen3_vl")
    prompt = ask(plain, "Hello", tiny_image(1))
    difference = start(model, prompt).logits - start(plain, prompt).logits
    assert float(mx.abs(difference).max()) > 1e-3
    assert model.info.fingerprint != plain.info.fingerprint
    with pytest.raises(BadRequest, match="adapter"):
        family.load(folder, LoadOptions(adapter=tmp_path / "nowhere"))


def test_the_context_length_is_option_or_config_or_default(folders, tmp_path: Path) -> None:
    """The operator's choice, the config's, else the family's own default."""
    folder = copied(folders("gemma3"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if k != "max_position_embeddings"}
    rewrite(folder, text_config=text)
    family = family_of(PLUGINS["gemma3"])
    assert family.load(folder, LoadOptions()).info.context_length == 131072
    assert family.load(folder, LoadOptions(context_length=500)).info.context_length == 500
