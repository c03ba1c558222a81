"""For plugins that run one model in several processes: names for every process, without MLX.

| name | what for |
|---|---|
| `PREFIX`, `EngineSettings`, `engine_settings` | settings, and the prefix of their variables |
| `Plugin`, `PluginRegistry`, `installed_version` | the plugins in use, versions |
| `Fault`, `Isolation` | a block of code whose errors do not pass |
| `log_to_stderr`, `printable` | lines for people |
| `ProcessStatus` | what an engine shows of each process |

`replicas.server` has the names of an engine server, `replicas.engine` those of the engine, which
import MLX. These names follow the core: a minor version may change them, and its changelog says so.
"""

from ..config import PREFIX, EngineSettings, engine_settings
from ..installed import installed_version
from ..isolation import Fault, Isolation
from ..log_lines import log_to_stderr, printable
from ..protocol.health import ProcessStatus
from ..registry import Plugin, PluginRegistry

__all__ = [
    "PREFIX",
    "EngineSettings",
    "Fault",
    "Isolation",
    "Plugin",
    "PluginRegistry",
    "ProcessStatus",
    "engine_settings",
    "installed_version",
    "log_to_stderr",
    "printable",
]
