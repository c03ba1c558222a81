"""New plugins: a folder from a template, whose tests pass at once.

`templates/common` holds what every plugin has, a folder beside it for each kind what that one has
of its own. All are Jinja2 files; `package` becomes the name of the module.
"""

from .kinds import KINDS, Kind
from .naming import PluginName, named
from .writing import write_plugin

__all__ = ["KINDS", "Kind", "PluginName", "named", "write_plugin"]
