"""`python -m mlx_provider_ranks`: the supervisor of a group of ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_provider.errors import MLXProviderError

from .launching import GroupOptions
from .supervisor import supervise


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and supervise. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mlx_provider_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--starting-port", type=int)
    parser.add_argument("--drain", type=float, default=0.0)
    group, serve = parser.parse_known_args(arguments)
    drain = group.__dict__.pop("drain")
    serve += ["--drain", str(drain)] if drain else []
    try:
        return supervise(GroupOptions(**vars(group)), serve, drain)
    except MLXProviderError as error:
        sys.stderr.write(f"mlx-provider: {error.message}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
