"""Operator options: which of them need separate weights, and which values are refused."""

import gc
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider.errors import BadRequest, ContextTooLong, LoadFailed
from mlx_provider.litellm.model_info import operator_options
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.engine_builder import cache_maker
from tiny import build


def same_weights(client: Any) -> set[int]:
    """An id for each set of weights in memory."""
    return {id(loaded) for loaded in client.service.models.queue.models()}


@pytest.fixture
def model(own_model: Any, build_tiny: Any) -> Any:
    """A model on a separate service."""
    return own_model(build_tiny("qwen3", head_dim=32), kv_layout="solo")


# -- sharing


def test_models_with_options_that_do_not_change_weights_share_weights(model: Any) -> None:
    gc.collect()  # frees the objects of earlier tests first
    before = mx.get_active_memory()
    text = model.ask(max_tokens=6).only.content
    one = mx.get_active_memory() - before
    for chosen in (
        {"context_length": 2048},
        {"tool_parser": "mistral"},
        {"reasoning_parser": "deepseek_r1"},
        {"allow_media": ["private"]},
    ):
        answer = model.ask(max_tokens=6, options=ModelOptions(**chosen))
        assert (answer.only.content + answer.only.reasoning).strip() == text.strip()
    assert len(same_weights(model)) == 1
    assert mx.get_active_memory() - before < 1.2 * one
    quantised = ModelOptions(kv_bits=8)
    assert model.ask(max_tokens=6, options=quantised).only.reason == "length"
    kinds = {each.key.kind for each in model.service.models.queue.models()}
    assert kinds == {"", "8 bits"}, "an engine of another kind has its own weights"


def test_each_alias_keeps_its_own_options(model: Any) -> None:
    short, tools = ModelOptions(context_length=64), ModelOptions(tool_parser="mistral")
    assert model.ask("word " * 30).only.reason == "length"
    with pytest.raises(ContextTooLong, match="63 maximum"):
        model.ask("word " * 30, options=short)
    assert model.ask("hi", max_tokens=500, options=short).usage.completion_tokens < 64
    model.ask(options=tools)
    found = {(s.context_length, s.tool_parser) for s in model.client.health().models}
    assert found == {(64, "hermes"), (32768, "hermes"), (32768, "mistral")}


def test_names_of_one_folder_share_its_weights(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(model.model)
    snapshot = tmp_path / "models--maker--toy" / "snapshots" / ("0" * 40)
    refs = tmp_path / "models--maker--toy" / "refs"
    snapshot.parent.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    shutil.copytree(model.model, snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in (model.model, str(link), f"{model.model}/../{Path(model.model).name}"):
        assert model.ask(model=name).only.reason == "length"
    assert len(same_weights(model)) == 1
    for name in ("maker/toy", "maker/toy@main", str(snapshot)):
        assert model.ask(model=name).only.reason == "length"
    assert len(same_weights(model)) == 2


def test_concurrent_requests_for_aliases_load_once(model: Any) -> None:
    aliases = [ModelOptions(context_length=length) for length in (512, 1024, 2048, 4096)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda options: model.ask(options=options), aliases))
    assert len(same_weights(model)) == 1


def test_prefixes_are_shared_by_aliases(model: Any) -> None:
    text = "The same long beginning of a question. " * 4
    model.ask(text)
    assert model.ask(text, options=ModelOptions(context_length=2048)).usage.cached_tokens > 0
    quantised = ModelOptions(kv_bits=8)
    assert model.ask(text, options=quantised).usage.cached_tokens == 0


TOY = """
from dataclasses import replace
from mlx_provider import LoadedModel, ModelFamily, hookimpl

mlx_provider_api = 1
seen = []


class Wrapped:
    def __init__(self, inner, info):
        self.inner, self.info = inner, info

    def __getattr__(self, name):
        return getattr(self.inner, name)


def load(folder, options):
    from mlx_provider.families.text import load_text

    seen.append((options.context_length, dict(options.extra)))
    own = load_text(folder, options)
    limit = options.context_length or 1000
    return Wrapped(own, replace(own.info, context_length=limit))


@hookimpl
def mlx_model_families():
    yield ModelFamily("toy", lambda config: 20, load, serves="toys")
"""


def test_a_third_party_family_can_read_the_context_length(
    install_plugin: Any, own_model: Any, build_tiny: Any
) -> None:
    name = install_plugin("mlx-provider-toy-context", TOY)
    registry = PluginRegistry.discover()
    model = own_model(build_tiny("qwen3"), kv_layout="solo", registry=registry)
    for length in (None, 500, 5000):
        model.ask(options=ModelOptions(context_length=length))
    lengths = {status.context_length for status in model.client.health().models}
    assert lengths == {1000, 500, 5000}
    seen = [length for length, _ in sys.modules[name].seen]
    assert seen == [None, 5000], "500 is less than its own: the same weights serve it"
    model.ask(options=ModelOptions(extra={"a": 1}))
    assert len(same_weights(model)) == 3


# -- wrong options


def refused(model: Any, **chosen: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        model.start(options=ModelOptions(**chosen))
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


def test_the_group_is_the_largest_that_divides_the_heads(model: Any, tiny: Any) -> None:
    for served, group in ((model, 32), (tiny("qwen3", head_dim=64, num_hidden_layers=1), 64)):
        options = ModelOptions(kv_bits=8)
        assert served.ask(options=options).only.reason == "length"
        made = cache_maker(served.served(options).model, options.kv_bits)()
        assert {layer.group_size for layer in made} == {group}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_vl", "qwen2_vl", "nemotron_h"])
def test_kv_bits_are_refused_if_no_group_size_divides_the_heads(family: str, tiny: Any) -> None:
    error = refused(tiny(family), kv_bits=4)
    assert error.param == "model_info.mlx.kv_bits"
    assert "leave kv_bits out" in error.message


def test_a_wrong_source_of_media_is_refused() -> None:
    with pytest.raises(BadRequest, match="allow_media"):
        operator_options({"model_info": {"mlx": {"allow_media": "file"}}})


def test_kv_bits_are_refused_for_a_model_with_attention_sinks(tiny: Any) -> None:
    """Attention sinks have no quantised form upstream."""
    error = refused(tiny("gpt_oss", head_dim=32), kv_bits=8)
    assert error.param == "model_info.mlx.kv_bits"
    assert "quantised KV cache" in error.message


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="other devices run experts in any dtype")
def test_a_dtype_that_the_device_cannot_run_is_refused(tiny: Any) -> None:
    error = refused(tiny("gpt_oss"), dtype="bfloat16")
    assert error.param == "model_info.mlx.dtype"
    assert "GatherMM" in error.message


@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_option_is_refused_before_a_load(option: str, model: Any) -> None:
    error = refused(model, **{option: "morse"})
    assert error.param == f"model_info.mlx.{option}"
    assert error.message.startswith(f"{error.param}: no ")
    assert "'morse' is installed" in error.message
    assert same_weights(model) == set(), "nothing is loaded for the sake of a wrong name"


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"x": mx.zeros(3)})
    return folder


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_vl", "qwen3_5", "qwen2_vl"])
def test_an_adapter_that_does_not_fit_is_refused(family: str, tiny: Any, tmp_path: Path) -> None:
    lora = {"rank": 4, "scale": 1.0, "dropout": 0.0}
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (
        tmp_path / "nowhere",
        empty,
        adapter(tmp_path / "wrong", words="none of these"),
        adapter(tmp_path / "other", num_layers=2, lora_parameters=lora, **lora),
    ):
        error = refused(tiny(family), adapter=str(folder))
        assert error.param == "model_info.mlx.adapter"
        assert folder.name in error.message


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "gemma3", "qwen2_vl"])
def test_untrusted_code_of_a_model_is_refused(family: str, qwen: Any, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", family)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_file": "model.py"}))
    assert refused(qwen.beside(folder)).param == "model_info.mlx.trust_remote_code"


def test_other_errors_do_not_name_an_option(qwen: Any, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3", head_dim=32)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadFailed):
        qwen.beside(folder).start(options=ModelOptions(kv_bits=8))
