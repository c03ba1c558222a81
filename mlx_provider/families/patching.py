"""Replaces a function of upstream by a family's own, for the models that call it.

`patch(modules, name, make)`: `make(original)` is called wherever one of the modules calls `name`.
Modules are shared by all models of an architecture, so the result must be correct for any of them.
`Unpatched(model)`: while entered, the modules of `model` have upstream's functions.
"""

from ..upstream.patching import Unpatched, patch

__all__ = ["Unpatched", "patch"]
