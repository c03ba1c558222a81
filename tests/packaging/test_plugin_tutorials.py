"""A tutorial shows what `mlx-provider new-plugin` writes, and sends nobody astray."""

import re
from pathlib import Path

import pytest

from mlx_provider.scaffold import KINDS, PluginName, render

PAGES = Path(__file__).parents[2] / "docs" / "plugins"


@pytest.mark.parametrize("option", KINDS)
def test_the_code_of_each_tutorial_equals_the_new_plugin_template(option: str) -> None:
    page = (PAGES / f"{option}.md").read_text(encoding="utf-8")
    (name,) = re.findall(rf"^\$ mlx-provider new-plugin (\S+) --{option}$", page, re.MULTILINE)
    files = render(PluginName(name), KINDS[option])
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    written = [text for path, text in files.items() if path.startswith("mlx_provider_")]
    assert sorted(shown) == sorted(written), written
    assert f"cd mlx-provider-{name}" in page
    assert f"pytest --mlx-conformance {name}" in page


def test_the_plugin_index_links_every_tutorial() -> None:
    page = (PAGES / "index.md").read_text(encoding="utf-8")
    for option in KINDS:
        assert f"`--{option}` | [" in page
        assert f"]({option}.md)" in page
