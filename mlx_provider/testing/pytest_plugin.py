"""The option `--mlx-conformance` of pytest, which runs the checks of `conformance`. Each pytest run
with this package installed imports this module, so slow imports are inside functions."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

OPTION = "--mlx-conformance"
NEEDED = "hypothesis"  # the package that the checks of parsers import


class Hooks:  # that this plugin adds to pytest
    @pytest.hookspec
    def pytest_mlx_conformance_models(  # type: ignore[empty-body]
        self, name: str
    ) -> Mapping[str, Callable[[Path], object]]:
        """Return the checkpoints for the model family `name`: by label, a function that writes one
        into an empty folder, in the form that users download (weights, `config.json`, tokenizer,
        chat template). Put this hook into the `conftest.py` of the plugin's tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("mlx-provider", "plugins of mlx-provider").addoption(
        OPTION, action="append", default=[], metavar="PLUGIN",
        help="check an installed plugin of mlx-provider, by the name of its entry point "
        "(repeatable; without further arguments nothing else runs)",
    )  # fmt: skip


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    names = config.getoption(OPTION)
    if not names:
        return
    if importlib.util.find_spec(NEEDED) is None:
        raise pytest.UsageError(f"{OPTION} needs {NEEDED}: pip install {NEEDED}")
    from .conformance import Collecting

    config.pluginmanager.register(Collecting(config, names), "mlx_conformance")
    # without paths in the command line, only the checks run
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
