"""A machine to be examined: as it should be, but for what a test changes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_provider.doctor import Subject
from mlx_provider.doctor.versions import TESTED
from tiny import build

Make = Callable[..., Subject]
VERSIONS = {tested.package: tested.newest_series + ".99" for tested in TESTED}


@pytest.fixture
def subject(tmp_path: Path) -> Make:
    """`subject(model, versions={...}, **fields)`; `environ` beside the runtime folder."""

    def make(
        model: str | Path | None = None,
        *,
        environ: dict[str, str] | None = None,
        versions: dict[str, str | None] | None = None,
        **fields: object,
    ) -> Subject:
        known: dict[str, str | None] = {**VERSIONS, **(versions or {})}
        own = {
            "MLX_PROVIDER_RUNTIME_DIR": str(tmp_path / "run"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            **(environ or {}),
        }
        return Subject(
            None if model is None else str(model),
            environ=own,
            home=tmp_path / "home",
            **{"is_mac": False, **fields},  # type: ignore[arg-type]
            installed=known.get,
        )

    return make


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that is as it should be."""
    return build(tmp_path_factory.mktemp("doctor") / "tiny", "qwen3")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))
