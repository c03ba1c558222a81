"""Where the kernels are chosen, and what other devices pay for them: nothing."""

import json
import subprocess
import sys

import pytest

from mlx_provider_cpu import matches

PROGRAM = """
import json, sys
from types import SimpleNamespace
import mlx.nn as nn
from mlx.nn.layers import activations
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving import loader

loader.device_kind = lambda: sys.argv[1]
loaded = SimpleNamespace(model=nn.GELU(approx="tanh"), info=SimpleNamespace(precision="float32"))
environ = {"MLX_PROVIDER_PLUGINS": "cpu"}
name = loader.equip(loaded, PluginRegistry.discover(environ))
assert loader.equip(loaded, PluginRegistry.discover(environ)) == name  # discovered in use, too
ours = sorted(module for module in sys.modules if module.startswith("mlx_provider_cpu"))
heavy = sorted({"threadpoolctl", "mlx_vlm"} & sys.modules.keys())
print(json.dumps([name, hasattr(activations.gelu_approx, "patch"), ours, heavy]))
"""


def equipped_on(device: str) -> list[object]:
    command = [sys.executable, "-c", PROGRAM, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_another_device_imports_nothing_of_it(device: str) -> None:
    assert equipped_on(device) == [None, False, ["mlx_provider_cpu"], []]


@pytest.mark.skipif(sys.platform == "darwin", reason="MLX is fast there")
def test_a_cpu_has_its_functions() -> None:
    name, patched, ours, _ = equipped_on("cpu")
    assert (name, patched) == ("cpu", True)
    assert "mlx_provider_cpu.attention" in ours  # type: ignore[operator]


def test_for_a_cpu_that_is_not_apples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert [matches(device, "low") for device in ("cpu", "metal", "cuda")] == [True, False, False]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not matches("cpu", "float32")
