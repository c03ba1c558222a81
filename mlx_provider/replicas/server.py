"""The engine server, for the one process of several that answers requests. Without MLX.

| name | what for |
|---|---|
| `options_parser`, `ServeOptions` | the command line of a server |
| `prepare_mlx` | this process, before MLX is imported |
| `serve`, `end_process` | a server from its start to its end |
| `Deliver`, `Service` | what a server needs of the part that serves requests |
| `ProcessGroup` | what a server knows of the other processes |
"""

from ..server.__main__ import options_parser
from ..server.process_group import ProcessGroup
from ..server.run import ServeOptions, end_process, prepare_mlx, serve
from ..serving.interface import Deliver, Service

__all__ = [
    "Deliver",
    "ProcessGroup",
    "ServeOptions",
    "Service",
    "end_process",
    "options_parser",
    "prepare_mlx",
    "serve",
]
