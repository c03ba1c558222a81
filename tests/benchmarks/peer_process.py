"""`python peer_process.py MODULE ARGUMENT...` runs a peer's module after loading the BLAS that our
engine uses: all sides compute with the same one."""

import runpy
import sys
from pathlib import Path

from mlx_provider.commands import preload_blas

if __name__ == "__main__":
    # no module of this folder takes the place of one of the peer's
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    preload_blas()
    _, module, *rest = sys.argv
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
