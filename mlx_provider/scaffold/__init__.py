"""New plugins: a folder from a template, whose tests pass at once.

`templates/common` has the files of every plugin, and a folder for each kind has the files of that
kind. All are Jinja2 files; `package` becomes the name of the module.
"""

from .writing import KINDS, Kind, PluginName, named, write_plugin

__all__ = ["KINDS", "Kind", "PluginName", "named", "write_plugin"]
