"""`python -m mlx_provider.server`: one engine process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..config import PREFIX

if TYPE_CHECKING:
    from .run import BuildService


def main(
    arguments: Sequence[str] | None = None,
    build: BuildService | None = None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Returns the exit code. `fixed`: see `run.serve`."""
    from .run import ServeOptions, serve

    parser = argparse.ArgumentParser(prog="python -m mlx_provider.server", description=__doc__)
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", help="address to listen on; default with --port: 127.0.0.1")
    parser.add_argument("--port", type=int, help="port to listen on; default with --host: 8080")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        help="file with the key that clients on TCP must send, or lines NAME KEY for several "
        f"tenants (else {PREFIX}API_KEY, else one is made and kept)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=0.0,
        help="seconds that requests may take to end after a stop signal (on TCP)",
    )
    return serve(ServeOptions(**vars(parser.parse_args(arguments))), build, fixed)


def run_process(fixed: Mapping[str, Any] = MappingProxyType({})) -> None:
    from .run import end_process

    end_process(main(fixed=fixed))


if __name__ == "__main__":
    run_process()
