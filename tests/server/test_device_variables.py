"""Variables of MLX that an engine sets before it imports MLX."""

from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_provider.client.runtime_folder import identity
from mlx_provider.upstream.runtime import BUFFERS, CUDA, KERNEL_FOLDER, set_variables
from python_process import run_python


def variables(given: dict[str, str] | None = None, state: Path | None = None, **of: object) -> dict:
    environ = dict(given or {})
    set_variables(state, environ, **of)  # type: ignore[arg-type]
    return environ


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    """The folder of NVIDIA's driver on a machine with one card."""
    card = tmp_path / "gpus" / "0000:17:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 120\n")
    return card.parent


@pytest.mark.parametrize("chip", ["Apple M1 Ultra", "Apple M3", "Apple M4 Max\n"])
def test_command_buffers_are_larger_on_chips_that_gain(chip: str) -> None:
    assert variables(platform="darwin", chip=chip) == BUFFERS


@pytest.mark.parametrize("chip", ["Apple M5 Max", "Apple M10", "Intel(R) Xeon(R)", ""])
def test_other_chips_keep_the_defaults(chip: str) -> None:
    assert variables(platform="darwin", chip=chip) == {}


def test_an_nvidia_card_gets_exact_products_and_a_kernel_folder_per_card(
    cards: Path, tmp_path: Path
) -> None:
    found = variables(state=tmp_path, platform="linux", cards=cards)
    folder = tmp_path / "kernels" / version("mlx") / "NVIDIA-H100-80GB-HBM3"
    assert found == CUDA | {KERNEL_FOLDER: str(folder)}
    assert found["MLX_ENABLE_TF32"] == "0"
    assert variables(platform="linux", cards=cards) == CUDA
    other = variables(state=tmp_path, platform="linux", cards=tmp_path / "none")
    assert other[KERNEL_FOLDER] == str(tmp_path / "kernels" / version("mlx"))


def test_variables_set_by_the_user_are_kept(cards: Path, tmp_path: Path) -> None:
    given = {"MLX_MAX_OPS_PER_BUFFER": "7"}
    assert variables(given, platform="darwin", chip="Apple M2") == BUFFERS | given
    given = {**dict.fromkeys(CUDA, "1"), KERNEL_FOLDER: "/somewhere"}
    assert variables(given, tmp_path, platform="linux", cards=cards) == given


def test_device_variables_do_not_change_the_identity_of_an_engine() -> None:
    assert identity({**BUFFERS, **CUDA, KERNEL_FOLDER: "/x"}) == identity({})
    assert identity({"MLX_DISABLE_COMPILE": "1"}) != identity({})


def test_variables_are_set_before_mlx_is_imported() -> None:
    program = (
        "import sys; from mlx_provider.server import run\n"
        "seen = []; run.set_variables = lambda state: seen.append('mlx.core' in sys.modules)\n"
        "run.prepare_mlx()\n"
        "assert seen == [False], seen"
    )
    run_python(program)
