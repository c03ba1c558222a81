"""JSON files of a model folder that would keep their reader busy for ever, or break it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from in_process import InProcessClient
from mlx_provider.engine.prefix_cache import files
from mlx_provider.engine.prefix_cache.files import BadFile
from mlx_provider.errors import BadRequest, UnsupportedModel
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.estimate import check_sizes, footprint
from mlx_provider.serving.hub import checkpoint
from mlx_provider.serving.service import ChatService
from mlx_provider.serving.weight_files import broken_files, check_folder
from mlx_provider.settings import EngineSettings
from tiny import build

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
ENDLESS_SHAPE = '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'
ENDLESS_DATA = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}'
MANY = 100_000_000
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "m", "qwen3")


@pytest.fixture
def model(qwen: Path, tmp_path: Path) -> Path:
    """A folder of links to a model's files, to be planted in."""
    folder = tmp_path / "m"
    folder.mkdir()
    for path in qwen.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def plant(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def change(model: Path, *inside: str, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    part = config
    for key in inside:
        part = part.setdefault(key, {})
    part.update(fields)
    plant(model / "config.json", json.dumps(config))


@pytest.mark.parametrize(
    ("inside", "field"),
    [
        ((), {"num_hidden_layers": MANY}),
        ((), {"num_hidden_layers": 10**30}),
        ((), {"layer_types": ["full_attention"] * 20_000}),
        ((), {"vocab_size": 10**12}),
        ((), {"num_nextn_predict_layers": MANY}),
        (("text_config",), {"num_hidden_layers": MANY}),
        (("vision_config",), {"depth": MANY}),
        (("audio_config", "encoder"), {"n_layers": MANY}),
    ],
)
def test_sizes_without_weights_are_refused_by_their_key(model, inside, field):
    change(model, *inside, **field)
    (key,) = field
    with pytest.raises(UnsupportedModel, match=key):
        check_folder(model)


def test_an_adapter_whose_rank_differs_from_its_weights_is_refused(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    plant(adapter / "adapter_config.json", json.dumps({"lora_parameters": {"rank": 10**12}}))
    with pytest.raises(UnsupportedModel, match="rank"):
        check_folder(model, adapter)


def test_absurd_layer_counts_are_refused_without_weights():
    config = {"num_hidden_layers": MANY, "num_attention_heads": 1, "hidden_size": 64}
    for given in (config, {"parts": [config]}):
        with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
            footprint(given, 1)
    check_sizes({"num_hidden_layers": 126, "max_position_embeddings": 10**12})


@pytest.mark.parametrize(
    "name",
    "config.json generation_config.json tokenizer_config.json preprocessor_config.json "
    "chat_template.json special_tokens_map.json model.safetensors.index.json".split(),
)
def test_deeply_nested_json_is_refused_with_its_file(model, name):
    plant(model / name, DEEP)
    with pytest.raises(BadRequest, match=name):
        check_folder(model)


def test_deeply_nested_json_is_refused_before_a_load(model, tmp_path):
    (model / "chat_template.jinja").unlink(missing_ok=True)
    plant(model / "tokenizer_config.json", DEEP)
    assert checkpoint(str(model)).chat_template == ""
    plant(model / "config.json", DEEP)
    with pytest.raises(BadRequest, match=r"config\.json"):
        checkpoint(str(model))


@pytest.mark.parametrize("text", [DEEP, "1", "null", '{"a": 1}', ENDLESS_SHAPE, ENDLESS_DATA])
def test_a_strange_safetensors_header_is_reported_as_a_broken_file(model, text):
    header = text.encode()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors is " in "".join(broken_files(model))
    check_folder(model)  # the loader says what is wrong with it


def deep_header(path: Path) -> None:
    header = DEEP.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def deep_layers(path: Path) -> None:
    save_file({}, path, metadata={"versions": "v", "header": DEEP, "checksum": "a"})


@pytest.mark.parametrize("damage", [deep_header, deep_layers])
@pytest.mark.parametrize("reads", [files.read_header, files.read])
def test_deeply_nested_json_in_a_prefix_file_is_a_bad_file(tmp_path, damage, reads):
    path = tmp_path / "a.safetensors"
    damage(path)
    with pytest.raises(BadFile, match="header"):
        reads(path, "v")


ON_LOAD: dict[str, Callable[[Path], None]] = {
    "layers": lambda folder: change(folder, num_hidden_layers=MANY),
    "deep config": lambda folder: plant(folder / "config.json", DEEP),
    "deep tokenizer": lambda folder: plant(folder / "tokenizer.json", DEEP),
    "deep tokenizer config": lambda folder: plant(folder / "tokenizer_config.json", DEEP),
}


@pytest.mark.parametrize("bomb", ON_LOAD)
def test_a_strange_folder_is_refused_and_the_engine_goes_on(model, qwen, bomb):
    service = ChatService(EngineSettings(), registry=PluginRegistry.discover({}))
    client = InProcessClient(service)
    try:
        ON_LOAD[bomb](model)
        with pytest.raises(BadRequest):
            client.submit(GenerateRequest(model=str(model), messages=HELLO))
        assert client.count(GenerateRequest(model=str(qwen), messages=HELLO))
        options = ModelOptions(drafter="model", draft_model=str(model))
        with pytest.raises(BadRequest):
            client.submit(GenerateRequest(model=str(qwen), messages=HELLO, options=options))
    finally:
        service.close()
