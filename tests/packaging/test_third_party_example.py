"""The README's plugin of ten lines is the example's, and it works."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from named_plugins import discover

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_plugin"
SOURCE = (EXAMPLE / "mlx_provider_angle.py").read_text(encoding="utf-8")
PROJECT = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_the_readme_contains_the_code_of_the_third_party_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", readme, re.DOTALL)
    assert SOURCE in blocks
    assert PROJECT in blocks


def test_the_third_party_example_has_the_line_counts_of_the_readme() -> None:
    code = [line for line in SOURCE.splitlines() if line and not line.startswith("import json")]
    assert len(code) <= 10
    assert len(PROJECT.splitlines()) == 6


def test_the_example_is_found_and_parses_a_call(install_plugin: Callable[..., str]) -> None:
    project = tomllib.loads(PROJECT)
    assert project["project"]["entry-points"]["mlx_provider"] == {"angle": "mlx_provider_angle"}
    name = install_plugin(project["project"]["name"], SOURCE)
    registry = discover(name)
    assert registry.plugins[0].error is None
    parser = registry.detect_tool_parser("... <call>{{ call }}</call> ...")
    (call,) = parser.parse('{"name": "roll", "args": {"sides": 6}}', [])
    assert (call.name, json.loads(call.arguments)) == ("roll", {"sides": 6})
