"""Finds problems on this machine, with their remedies.

    from mlx_provider.doctor import Subject, examine
    for finding in examine(Subject("mlx-community/some-model"), thorough=False): ...

Every check is a function from a `Subject` to `Finding`s; `examination` lists them.
Checks change nothing, and use the network only for a model that is not on this machine.
"""

from .examination import examine
from .findings import STATES, Finding, as_json, by_severity, healthy
from .subject import Subject, System

__all__ = [
    "STATES",
    "Finding",
    "Subject",
    "System",
    "as_json",
    "by_severity",
    "examine",
    "healthy",
]
