"""Fixtures for tests of plugins, and `--mlx-conformance`. pytest finds this module by itself.

Every pytest of an environment that has this package imports it: whatever takes time is imported by
what uses it.
"""

from __future__ import annotations

import importlib.util

import pytest

from .conformance import hooks

OPTION = "--mlx-conformance"
NEEDED = "hypothesis"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mlx-provider", "plugins of mlx-provider")
    group.addoption(
        OPTION,
        action="append",
        default=[],
        metavar="PLUGIN",
        help="check an installed plugin of mlx-provider, by the name of its entry point "
        "(repeatable; without further arguments nothing else runs)",
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    """With the option, run the checks, and what is named beside it."""
    names = config.getoption(OPTION)
    if not names:
        return
    if importlib.util.find_spec(NEEDED) is None:
        raise pytest.UsageError(f"{OPTION} needs {NEEDED}: pip install 'mlx-provider[testing]'")
    from .conformance.items import Collecting

    config.pluginmanager.register(Collecting(config, names), "mlx_conformance")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
