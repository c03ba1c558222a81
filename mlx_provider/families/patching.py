"""Replaces a function of upstream by a family's own, for the models that call it.

`patch(modules, name, make)`: `make(original)` replaces `name` in the modules. All models of an
architecture share them, so the result must be correct for each. Inside `with Unpatched(model)`, the
modules of `model` have upstream's functions.
"""

from ..upstream.patching import Unpatched, patch

__all__ = ["Unpatched", "patch"]
