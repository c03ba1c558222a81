"""Checks that need only Python. They explain why the others cannot be imported."""

from __future__ import annotations

from . import versions
from .checks import Check

REINSTALL = "install mlx-provider anew, into an environment of its own"
ASIDE = "go on without: nothing else depends on this check; report it if it lasts"

CHECKS = (
    Check("versions.python", versions.python, REINSTALL),
    Check("versions.system", versions.operating_system, ASIDE),
    Check("versions.packages", versions.packages, REINSTALL),
    Check("known_bad", versions.known_bad, REINSTALL),
    Check("versions.backend", versions.backend, REINSTALL),
)
