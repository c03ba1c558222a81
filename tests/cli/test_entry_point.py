"""The program's own ends, before a command has its handlers."""

import pytest

from command_line import invoke
from mlx_provider.cli import app
from mlx_provider.registry import PluginRegistry
from named_plugins import discover


def test_ctrl_c_during_the_imports_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> PluginRegistry:
        raise KeyboardInterrupt

    monkeypatch.setattr(app.PluginRegistry, "discover", interrupted)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 130


def test_a_list_without_models_names_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_provider.serving.hub.models_on_disk", list)
    shown = invoke("list", plugins=None).stdout
    assert shown.startswith("none yet; `demo` is part of this package")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(value: str) -> None:
    done = invoke("bench", "compare", "--limit", value, plugins=None)
    assert done.exit_code == 2


def test_every_client_record_has_the_size_of_its_first_prompt() -> None:
    registry = discover("clients")
    assert all(client.prompt_bytes > 0 for client in registry.clients.values())
