"""A plugin of each supported API version loads, serves and is called as promised."""

import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from mlx_provider import hookspecs
from mlx_provider.protocol.requests import ModelOptions
from named_plugins import discover

FROZEN = Path(__file__).parents[1] / "data" / "plugins"
OPTIONS = ModelOptions(tool_parser="day-before", reasoning_parser="yesterday", drafter="yesterday")
SCHEMA = {"type": "object", "properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"]}
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": SCHEMA}}]
ASKED: dict[str, Any] = {
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 300,
    "options": OPTIONS,
}
HOOKS = {name for name, spec in vars(hookspecs).items() if hasattr(spec, "mlx_provider_spec")}
Install = Callable[..., str]


@pytest.mark.usefixtures("eager_drafts")
@pytest.mark.parametrize("version", range(hookspecs.OLDEST_API, hookspecs.API_VERSION + 1))
def test_a_plugin_of_an_older_api_serves_and_is_called_as_promised(
    version: int, install_plugin: Install, own_model: Any, build_tiny: Any
) -> None:
    source = (FROZEN / f"plugin_of_api_{version}.py").read_text(encoding="utf-8")
    name = install_plugin("yesterday", source)
    registry = discover(name, "text")
    own = registry.plugins[1]
    assert (own.error, set(own.hooks)) == (None, HOOKS)
    assert own.notes == () or version < hookspecs.API_VERSION
    calls = importlib.import_module(name).CALLS

    folder = build_tiny("llama")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "yesterday"}
    (folder / "config.json").write_text(json.dumps(config))
    model = own_model(folder, registry=registry)
    ((called, arguments),) = model.ask(**ASKED).only.arguments
    assert (called, arguments["sides"] in (6, 20)) == ("roll", True)
    assert model.served(OPTIONS).reasoning_parser.name == "yesterday"

    first = Counter(each for each, _ in calls)
    for hook in HOOKS - {"mlx_register_commands"}:
        assert first[hook] == 1, f"{hook} is called once, when plugins are discovered"
    assert (first["matches"], first["load"]) == (1, 1)
    assert (first["refuses"], first["start"]) == (1, 1)
    assert first["propose"] >= 1
    assert first["replacements"] == 0
    (engine_thread,) = {thread for each, thread in calls if each in ("load", "start", "propose")}
    assert {thread for each, thread in calls if each == "mlx_drafters"} != {engine_thread}

    model.ask(**ASKED)
    then = Counter(each for each, _ in calls) - first
    assert then.keys() <= {"parse", "propose"}, "a loaded model asks for nothing else again"

    result = invoke("yesterday", "you", plugins=registry)
    assert result.stdout == "hello you\n"
    assert Counter(each for each, _ in calls)["mlx_register_commands"] == 1
