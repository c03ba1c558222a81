"""`python -m mlx_provider.server`: one engine process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .run import BuildService


def main(
    build: BuildService | None = None, fixed: Mapping[str, Any] = MappingProxyType({})
) -> NoReturn:
    from .run import ServeOptions, end_process, serve

    parser = argparse.ArgumentParser(description="as `mlx-provider serve`")
    for name, kind in (("host", str), ("port", int), ("api-key-file", Path), ("drain", float)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    for name in ("lock-fd", "ready-fd"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    end_process(serve(ServeOptions(**vars(parser.parse_args())), build, fixed))


if __name__ == "__main__":
    main()
