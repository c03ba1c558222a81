"""Run the checks of one plugin in this process."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.isolation import Isolation
from mlx_provider.testing.conformance import Laboratory, NotApplicable, cases_of, find

Builders = Mapping[str, Callable[[Path], Any]]
Failures = dict[str, str]
"""What was found, by check; of a model, by `check [checkpoint, format]`."""
Check = Callable[..., Failures]


@pytest.fixture
def failures() -> Iterator[Check]:
    """`failures(plugin, builders)`: what the checks of an installed plugin find.

    `only`: words of which one must stand in a check's subject or variant, or in its name.
    """
    laboratories: list[Laboratory] = []

    def run(name: str, builders: Builders | None = None, only: tuple[str, ...] = ()) -> Failures:
        lab = Laboratory(lambda record: builders or {})
        laboratories.append(lab)
        found: Failures = {}
        for case in cases_of(*find(name), lab):
            whole = f"{case.subject} {case.variant} {case.check}"
            if only and not any(word in whole for word in only):
                continue
            with Isolation() as trying:
                case.run()
            if trying.fault is not None and not isinstance(trying.fault.error, NotApplicable):
                key = f"{case.check} [{case.variant}]" if case.variant else case.check
                found[key] = trying.fault.summary
        return found

    yield run
    for lab in laboratories:
        lab.close()
