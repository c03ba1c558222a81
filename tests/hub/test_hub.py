"""Where a model is found, and what is said when it is not."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mlx_provider.errors import BadRequest, ModelNotFound
from mlx_provider.serving.hub import (
    Outline,
    cached_models,
    folder_of,
    full_name,
    local_folder,
    outline,
)

CONFIG = '{"model_type": "llama"}'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with one whole repository in it."""
    root = tmp_path / "hub"
    snapshot = root / "models--maker--small" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    refs = root / "models--maker--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    return root


def test_the_demo_model_is_part_of_the_package() -> None:
    assert (folder_of("demo") / "config.json").is_file()


def test_a_model_folder_is_used_directly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert folder_of(str(tmp_path)) == tmp_path


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no config\.json"):
        folder_of(str(tmp_path))


def test_a_cached_repository_needs_no_hub(cache: Path) -> None:
    assert cached_models() == ["maker/small"]
    assert (folder_of("maker/small") / "config.json").is_file()


def test_offline_a_missing_model_is_refused_with_the_cached_models(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"HF_HUB_OFFLINE is set.*maker/small.*demo"):
        folder_of("maker/large")


def test_an_offline_hub_shows_cached_models(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match=r"out of reach.*maker/small"):
        folder_of("maker/large")


def test_an_unknown_repository_is_refused_after_one_hub_request(cache: Path, hub: Any) -> None:
    with pytest.raises(ModelNotFound, match=r"no repository maker/large.*HF_TOKEN"):
        folder_of("maker/large")
    assert hub.asked == ["GET /api/models/maker/large/revision/main?blobs=true"]


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nowhere", "nowhere", "~nobody/x", "~no_such_user/x", "a/b/c"]
)
def test_a_missing_path_is_refused_with_the_folder_and_the_remedy(name: str) -> None:
    """The error names the folder, and the remedy if it is relative to a folder of the engine."""
    with pytest.raises(ModelNotFound, match="no folder") as refused:
        folder_of(name)
    whole = name.startswith(("/", "~nobody"))
    assert ("give the full path" in refused.value.message) is not whole
    assert whole or str(Path.cwd() / name) in refused.value.message


def test_a_full_name_is_found_from_any_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    assert full_name("mlx/./demo") == full_name("../models/demo") == str(tmp_path / "models/demo")
    for name in ("demo", "maker/small", "nowhere"):
        assert full_name(f"mlx/{name}") == name


def test_a_cached_model_is_found_without_a_hub_request(cache: Path, hub: Any) -> None:
    assert local_folder("maker/small") == folder_of("maker/small")
    assert local_folder("maker/away") is None
    assert hub.asked == []


def test_an_outline_is_read_from_the_hub_without_a_download(
    cache: Path, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFound, match="no repository maker/away"):
        outline("maker/away")
    sizes = {"model-1": 5, "model-2": 6, "consolidated": 11}
    files = {f"{name}.safetensors": b"0" * size for name, size in sizes.items()}
    hub.files["maker/away"] = files | {"tokenizer.json": b"{}", "config.json": CONFIG.encode()}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert outline("maker/away") == Outline({"model_type": "llama"}, 11)
    hub.busy = {"config.json"}
    with pytest.raises(ModelNotFound, match="the Hub answers 503 for maker/away"):
        outline("maker/away")
    assert not (cache / "models--maker--away").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        outline("maker/away")
