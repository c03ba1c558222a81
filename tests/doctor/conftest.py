"""A machine to be examined: as it should be, but for what a test changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_provider.doctor import Finding, Subject, System
from mlx_provider.doctor.versions import TESTED
from tiny import build

Make = Callable[..., Subject]
MAC = System("Darwin", "15.1", "arm64", "3.12.4")
LINUX = System("Linux", "2.39", "x86_64", "3.12.4")
VERSIONS = {tested.package: tested.newest + ".99" for tested in TESTED}


@pytest.fixture
def subject(tmp_path: Path) -> Make:
    """`subject(model, versions={...}, **fields)`; `environ` beside the runtime folder."""

    def make(
        model: str | Path | None = None,
        *,
        environ: dict[str, str] | None = None,
        versions: dict[str, str | None] | None = None,
        system: System = LINUX,
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
            system=system,
            installed=known.get,
            **fields,  # type: ignore[arg-type]
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


def states(findings: list[Finding]) -> dict[str, str]:
    """By name, the worst where there are several."""
    found: dict[str, str] = {}
    order = ["ok", "note", "warn", "fail"]
    for each in findings:
        worst = found.get(each.name, "ok")
        found[each.name] = max(worst, each.state, key=order.index)
    return found
