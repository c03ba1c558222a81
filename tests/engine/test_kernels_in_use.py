"""The kernels that the engine's tests use."""

import sys

import pytest
from mlx_lm.models import activations
from mlx_lm.models import qwen3 as module

from mlx_provider.families.text import TextModel
from mlx_provider.serving.loader import device_kind


def test_cpu_kernels_are_in_use_unless_the_option_leaves_out_their_plugin(
    qwen3: TextModel, pytestconfig: pytest.Config
) -> None:
    left_out = "cpu" in pytestconfig.getoption("--without-plugin")
    ours = device_kind() == "cpu" and sys.platform != "darwin" and not left_out
    assert (module.swiglu is not activations.swiglu) == ours
