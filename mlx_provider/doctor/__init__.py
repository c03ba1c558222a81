"""What is wrong on this machine, and what to do about it.

    from mlx_provider.doctor import Subject, examine
    for finding in examine(Subject("mlx-community/some-model"), thorough=False): ...

Every check is a function from a `Subject` to `Finding`s and stands in a module by its subject;
`base_checks` and `mlx_checks` list them. None changes anything, and none needs the network but
for a model that the Hub alone has.
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
