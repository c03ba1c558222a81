"""Where the kernels are chosen, and what other devices pay for them: nothing."""

import json
import sys

import pytest

from mlx_provider_cpu import matches
from python_process import run_python

PROGRAM = """
import json, sys
from types import SimpleNamespace
import mlx.nn as nn
from mlx.nn.layers import activations
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving import loader

loaded = SimpleNamespace(model=nn.GELU(approx="tanh"), info=SimpleNamespace(precision="float32"))
environ = {"MLX_PROVIDER_PLUGINS": "cpu"}
for device in ("metal", "cuda", "cpu"):
    loader.device_kind = lambda: device
    name = loader.equip(loaded, PluginRegistry.discover(environ))
    # discovered in use, too
    assert loader.equip(loaded, PluginRegistry.discover(environ)) == name
    ours = sorted(module for module in sys.modules if module.startswith("mlx_provider_cpu"))
    heavy = sorted({"threadpoolctl", "mlx_vlm"} & sys.modules.keys())
    print(json.dumps([name, hasattr(activations.gelu_approx, "patch"), ours, heavy]))
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="MLX is fast there")
def test_only_a_cpu_imports_the_cpu_kernels() -> None:
    metal, cuda, cpu = map(json.loads, run_python(PROGRAM).stdout.splitlines())
    assert metal == cuda == [None, False, ["mlx_provider_cpu"], []]
    assert cpu[:2] == ["cpu", True]
    assert "mlx_provider_cpu.attention" in cpu[2]


def test_cpu_kernels_match_only_a_cpu_that_is_not_apples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert [matches(device, "low") for device in ("cpu", "metal", "cuda")] == [True, False, False]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not matches("cpu", "float32")
