"""`mlx-provider pull`, `list` and `rm`, with a Hub on loopback and huggingface_hub's own cache."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from command_line import invoke, told
from mlx_provider.errors import BadRequest
from mlx_provider.serving.hub import (
    OnDisk,
    folder_of,
    local_folder,
    models_on_disk,
    not_gguf,
    outline,
    remove,
)

CONFIG = json.dumps({"model_type": "llama"}).encode()
SHARDS = ["model-1.safetensors", "model-2.safetensors"]
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()
NAME = "maker/model"


@pytest.fixture(autouse=True)
def model(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hub.files[NAME] = {
        "config.json": CONFIG,
        "model.safetensors.index.json": INDEX,
        SHARDS[0]: b"1" * 1000,
        SHARDS[1]: b"2" * 2000,
        "model.gguf": b"3",
    }


def fetches(asked: str, file: str) -> bool:
    return asked.startswith("GET") and asked.endswith(file)


def pull(name: str = NAME) -> Result:
    return invoke("pull", name, plugins="text")


def run(*arguments: str) -> tuple[int, str]:
    result = invoke(*arguments, plugins="text", env={"COLUMNS": "200"})
    return result.exit_code, told(result)


def test_a_model_is_pulled_listed_and_removed(hub: Any, tmp_path: Path) -> None:
    done = pull()
    assert done.exit_code == 0, done.output
    assert "maker/model: 0.0 MB of weights in" in done.stdout
    assert "mlx-provider up maker/model" in done.stdout
    assert "%" in done.stderr  # huggingface_hub's progress bars
    assert not [path for path in hub.asked if path.endswith(".gguf")]
    first = local_folder(NAME)
    (found,) = models_on_disk()
    size = 3000 + len(CONFIG) + len(INDEX)
    assert found == OnDisk(NAME, size)
    hub.files[NAME][SHARDS[1]] = b"4" * 5000
    hub.asked.clear()
    assert pull().exit_code == 0
    assert not [each for each in hub.asked if fetches(each, SHARDS[0])]  # it has that
    assert local_folder(NAME) != first
    assert models_on_disk() == [OnDisk(NAME, size + 5000)]
    code, told = run("list")
    (line, total) = told.splitlines()
    assert (code, line.split()) == (0, [NAME, "0.0", "MB", "family", "text"])
    assert total.endswith(f"the Hub cache is {tmp_path}/hub")
    assert run("rm", NAME) == (0, f"{NAME} is removed, 0.0 MB\n")
    assert models_on_disk() == []
    assert not (tmp_path / "hub" / "models--maker--model").exists()


def test_an_interrupted_pull_is_listed_as_incomplete_and_resumes(hub: Any) -> None:
    hub.lost = {SHARDS[1]}
    done = pull()
    assert done.exit_code == 1
    assert "maker/model could not be downloaded" in str(done.exception)
    (found,) = models_on_disk()
    assert found.fault == "incomplete: `mlx-provider pull maker/model` fetches the rest"
    assert local_folder(NAME) is None
    hub.lost.clear()
    assert pull().exit_code == 0
    (found,) = models_on_disk()
    assert found.fault == ""


def test_a_download_that_has_only_begun_can_be_removed(hub: Any, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--maker--begun" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "x.incomplete").write_bytes(b"0" * 70)
    (found,) = models_on_disk()
    assert (found.name, found.size) == ("maker/begun", 70)
    assert "mlx-provider pull maker/begun" in found.fault
    assert remove("maker/begun") == 70
    assert models_on_disk() == []


@pytest.mark.parametrize("name", ["maker/model-7B-Q4_K_M-GGUF", "maker/model-7B-GGUF"])
def test_a_gguf_repository_is_refused_before_any_download(hub: Any, name: str) -> None:
    hub.files[name] = {"model-q4.gguf": b"0" * 10, "README.md": b""}
    remedy = "GGUF is not served: take an MLX version, such as mlx-community/model-7B-4bit"
    done = pull(name)
    assert (done.exit_code, done.stdout) == (1, "")
    assert remedy in str(done.exception)
    for ask in (outline, folder_of):
        with pytest.raises(BadRequest, match=remedy):
            ask(name)
    assert not [path for path in hub.asked if "resolve" in path]


def test_a_gguf_file_is_refused_with_an_mlx_version_to_take(tmp_path: Path) -> None:
    file = tmp_path / "model-Q8_0.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(BadRequest, match="such as mlx-community/model-4bit"):
        local_folder(str(file))


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen3-4B-Q4_K_M", "Qwen3-4B"),
        ("a/Qwen3-4B-GGUF", "Qwen3-4B"),
        ("x.IQ2_XS", "x"),
        ("Q", "Q"),
    ],
)
def test_the_name_of_the_mlx_version_is_derived_from_a_gguf_name(name: str, base: str) -> None:
    assert not_gguf(name).endswith(f"mlx-community/{base}-4bit")


def test_pull_of_an_unsupported_model_downloads_no_weights(hub: Any) -> None:
    hub.files[NAME]["config.json"] = b'{"model_type": "nobody"}'
    done = pull()
    assert done.exit_code == 1
    assert "nobody" in str(done.exception)
    assert not [path for path in hub.asked if path.endswith(".safetensors")]


@pytest.mark.parametrize("name", ["demo", "/folder", "maker/away", "maker/model@main", "../hub"])
def test_rm_refuses_a_name_that_is_not_in_the_hub_cache(hub: Any, name: str) -> None:
    code, told = run("rm", name)
    assert code == 1
    assert f"{name} is not in the Hub cache; on this machine: none" in told


@pytest.mark.parametrize("name", ["demo", "/folder", "~/folder", "a/b/c"])
def test_pull_refuses_a_name_that_is_no_repository(hub: Any, name: str) -> None:
    code, told = run("pull", name)
    assert (code, "not a repository" in told) == (1, True), told
    assert hub.asked == []
