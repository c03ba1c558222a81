"""The example of a family: an architecture of its own, served as any other."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.families.text import load_text
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import alone, new_engine, new_request, output_of, run
from mlx_provider.testing.tiny_greedy import start
from mlx_provider.testing.tiny_models import build

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_family"
CAP = 0.5
MESSAGES = [{"role": "user", "content": "Say hello"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = build(tmp_path / "model", "llama")
    change(folder, model_type="softcapped", logit_cap=CAP)
    return folder


def change(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    """Plugins, with the example's beside them as pip would leave it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"mlx_provider_softcap-{project['version']}.dist-info"
    info.mkdir(parents=True)
    head = f"Name: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{head}")
    points = project["entry-points"]["mlx_provider"].items()
    lines = "\n".join(f"{name} = {module}" for name, module in points)
    (info / "entry_points.txt").write_text(f"[mlx_provider]\n{lines}\n")
    for folder in (info.parent, EXAMPLE):
        monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    for name in ("mlx_provider_softcap", "mlx_provider_softcap.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return PluginRegistry.discover({})


@pytest.fixture
def model(installed: PluginRegistry, checkpoint: Path) -> LoadedModel:
    config = json.loads((checkpoint / "config.json").read_text())
    family, plugin = installed.family_for(config)
    assert (family.name, plugin.error) == ("softcapped", None)
    return family.load(checkpoint, LoadOptions())


def test_its_logits_are_those_of_the_layers_below_capped(
    model: LoadedModel, checkpoint: Path
) -> None:
    prompt = model.prepare(MESSAGES, tools=[], media=[], variables={})
    capped = start(model, prompt).logits
    change(checkpoint, model_type="llama")
    plain = start(load_text(checkpoint, LoadOptions()), prompt).logits
    assert float(mx.abs(plain).max()) > CAP
    assert mx.allclose(capped, CAP * mx.tanh(plain / CAP), atol=1e-5)


def test_rows_of_two_lengths_decode_together(model: LoadedModel) -> None:
    requests = [new_request(range(3, 3 + length)) for length in (5, 19)]
    engine = new_engine(model)
    for request in requests:
        engine.submit(request)
    run(engine)
    for request in requests:
        assert output_of(request).tokens == output_of(alone(model, request)).tokens
