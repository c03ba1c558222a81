"""`python -m mlx_provider.gateway.litellm_process DESCRIPTOR LOG [options]`: LiteLLM's proxy on a
socket of its parent, with a log of limited size. `litellm` takes no socket (1.106.2,
`proxy_cli.py`); the options are its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..client.connection import limit_log


def main() -> None:
    descriptor, log, *options = sys.argv[1:]
    limit_log(Path(log))
    import uvicorn as module
    from litellm.proxy.proxy_cli import run_server

    uvicorn: Any = module
    original = module.run

    def run(**given: Any) -> None:
        original(**given, fd=int(descriptor))

    uvicorn.run = run
    run_server(options)


if __name__ == "__main__":
    main()
