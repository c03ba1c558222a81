"""`python -m mlx_provider.server`: one engine process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import BuildService


def main(build: BuildService | None = None, fixed: Mapping[str, Any] = MappingProxyType({})) -> int:
    from .run import ServeOptions, serve

    parser = argparse.ArgumentParser(description="as `mlx-provider serve`")
    for name, kind in (("host", str), ("port", int), ("api-key-file", Path), ("drain", float)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    for name in ("lock-fd", "ready-fd"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    return serve(ServeOptions(**vars(parser.parse_args())), build, fixed)


def run_process(fixed: Mapping[str, Any] = MappingProxyType({})) -> None:
    from .run import end_process

    end_process(main(fixed=fixed))


if __name__ == "__main__":
    run_process()
