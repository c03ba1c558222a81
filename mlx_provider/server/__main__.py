"""`python -m mlx_provider.server`: one engine process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ..config import PREFIX
from .run import BuildService, ServeOptions, end_process, serve


def main(arguments: Sequence[str] | None = None, build: BuildService | None = None) -> int:
    """Parse the command line and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mlx_provider.server", description=__doc__)
    parser.add_argument("--host", help="address to listen on; default with --port: 127.0.0.1")
    parser.add_argument("--port", type=int, help="port to listen on; default with --host: 8080")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(PREFIX + "API_KEY"),
        help=f"key that clients must send (default: {PREFIX}API_KEY)",
    )
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    return serve(ServeOptions(**vars(parser.parse_args(arguments))), build)


if __name__ == "__main__":
    end_process(main())
