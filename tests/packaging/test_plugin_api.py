"""What plugins may rely on: written down whole, and never taken away within an API version.

`python tests/packaging/test_plugin_api.py` writes what was added into the newest list.
"""

import ast
import hashlib
import importlib
import inspect
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlx_provider
from mlx_provider import hookspecs, records
from mlx_provider.chat.output.whole_reply import read_chunks
from mlx_provider.registry import PluginRegistry
from named_plugins import discover

ROOT = Path(__file__).parents[2]
FROZEN = ROOT / "tests" / "data" / "plugins"
PAGE = (ROOT / "docs" / "plugins" / "hooks.md").read_text(encoding="utf-8")
HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "mlx_provider_spec")}
VERSIONS = range(hookspecs.OLDEST_API, hookspecs.API_VERSION + 1)
DIGESTS = {1: "069ef8342d5ec3d88e71a8ffc2ae0811c9b3dec1059ff643290308023fe3a09f"}
"""SHA-256 of each frozen plugin, which nobody edits: another API version gets another file."""
Install = Callable[..., str]
SOURCE = runpy.run_path(str(ROOT / "docs" / "records.py"))
classes, functions = SOURCE["classes"], SOURCE["functions"]


def surface() -> dict[str, Any]:
    """What an API version consists of."""
    all_classes = classes()
    return {
        "names": sorted(mlx_provider.__all__),
        "hooks": {name: f"({hook_arguments(name)})" for name in HOOKS},
        "records": {n: own(c) for n, c in all_classes.items() if not is_protocol(c)},
        "protocols": {n: own(c) for n, c in all_classes.items() if is_protocol(c)},
        "functions": {n: f"({SOURCE['arguments'](node)})" for n, node in functions().items()},
        "errors": {cls.__name__: [cls.status, cls.code] for cls in errors()},
    }


def listed_error(cls: type[mlx_provider.MLXProviderError]) -> str:
    """An error as the page has it."""
    return f"- `{cls.__name__}` ({cls.status}, `{cls.code}`): {one_line(cls.__doc__ or '')}"


def errors() -> list[type[mlx_provider.MLXProviderError]]:
    named = (getattr(mlx_provider, name) for name in mlx_provider.__all__)
    base = mlx_provider.MLXProviderError
    return [cls for cls in named if isinstance(cls, type) and issubclass(cls, base)]


def hook_arguments(hook: str) -> str:
    return ", ".join(inspect.signature(HOOKS[hook]).parameters)


def written_down() -> str:
    return json.dumps(surface(), indent=1, ensure_ascii=False) + "\n"


def own(node: ast.ClassDef) -> list[str]:
    return [line for line, _ in SOURCE["members_of"](node)]


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---- the page


def test_every_public_record_is_exported_at_the_package_root() -> None:
    assert set(records.__all__) <= set(mlx_provider.__all__)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_hooks_page_has_each_hook_with_arguments_cost_and_promise(hook: str) -> None:
    section = section_of(hook)
    assert section.startswith(f"## `{hook}({hook_arguments(hook)})`")
    assert one_line(HOOKS[hook].__doc__ or "") in section
    for part in ("**Cost.**", "**Promise.**"):
        assert part in section, f"{hook} has no {part}"
    assert "```python" in section or "Example: [" in section


@pytest.mark.parametrize("cls", errors())
def test_the_hooks_page_lists_every_error(cls: type[mlx_provider.MLXProviderError]) -> None:
    assert listed_error(cls) in PAGE, listed_error(cls)


def test_the_hooks_page_names_every_other_public_name() -> None:
    known = {*classes(), *functions(), *(cls.__name__ for cls in errors())}
    others = set(mlx_provider.__all__) - known
    assert [name for name in sorted(others) if f"`{name}" not in PAGE] == []


def section_of(hook: str) -> str:
    found = re.search(rf"^## `{hook}\(.*?(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the page has no section {hook}"
    return found[0]


@pytest.fixture
def example(install_plugin: Install) -> Callable[[str], Any]:
    """The registry with a hook's example alone, and the example's module."""

    def load(hook: str) -> tuple[PluginRegistry, Any]:
        (source,) = re.findall(r"```python\n(.*?)```", section_of(hook), re.DOTALL)
        name = install_plugin(f"mlx-provider-{hook.replace('_', '-')}", source)
        registry = discover(name)
        (plugin,) = registry.plugins
        assert (plugin.error, plugin.hooks, plugin.notes) == (None, (hook,), ())
        return registry, importlib.import_module(name)

    return load


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_tool_parser_example_reads_calls_of_its_grammar(example: Any, size: int) -> None:
    registry, _ = example("mlx_tool_parsers")
    parser = registry.tool_parser("acme")
    given = {"text": 'ends >> not, "nor" \\ here', "count": 3}
    written = parser.grammar.before.replace("{name}", "note") + json.dumps(given)
    reply = f"So: {written}{parser.grammar.after}"
    chunks = [reply[at : at + size] for at in range(0, len(reply), size)]
    read = read_chunks(chunks, tool_parser=parser)
    assert (read.content.strip(), read.whole_calls, read.faults) == ("So:", [("note", given)], ())
    cut = read_chunks([reply[:-9]], tool_parser=parser)
    assert (cut.calls[0][0], cut.whole_calls, cut.faults) == ("note", [], ())
    assert read_chunks(["<< 1"], tool_parser=parser).content == "<< 1"


def test_the_client_example_gets_url_key_and_context(example: Any, tmp_path: Path) -> None:
    registry, _ = example("mlx_clients")
    gateway = mlx_provider.Gateway(
        "http://127.0.0.1:4000", "key", "model", 4096, 1024, False, tmp_path, tmp_path
    )
    profile = registry.client("acme").profile(gateway)
    assert profile.environment["ACME_API_KEY"] == "key"
    assert json.loads(profile.files["acme.json"]) == {"window": 4096}


def test_the_command_example_of_the_hooks_page_runs(example: Any) -> None:
    from typer.testing import CliRunner

    from mlx_provider.cli.app import build

    registry, _ = example("mlx_register_commands")
    result = CliRunner().invoke(build(registry), ["acme", "you"], obj=registry)
    assert result.stdout == "hello you\n"


# ---- the promise that nothing is taken away


@pytest.mark.parametrize("version", VERSIONS)
def test_names_and_arguments_of_each_frozen_api_version_still_exist(version: int) -> None:
    """Fields and arguments may be added at the end, with defaults; names may be added.

    What a plugin implements (a protocol) gains nothing: a new ability is a protocol of its own.
    """
    then = json.loads((FROZEN / f"api_{version}.json").read_text(encoding="utf-8"))
    now = surface()
    assert set(then["names"]) <= set(now["names"])
    assert then["protocols"].items() <= now["protocols"].items()
    assert then["errors"].items() <= now["errors"].items()
    for name, fields in then["records"].items():
        kept = [field for field in now["records"][name] if field in fields]
        assert kept == fields, f"{name} has lost or changed a field"
        added = [field for field in now["records"][name] if field not in fields]
        assert [field for field in added if "=" not in field and "(" not in field] == []
    for kind in ("hooks", "functions"):
        for name, signature in then[kind].items():
            assert now[kind][name].startswith(signature[:-1]), f"{name} has lost an argument"


def test_the_frozen_file_of_the_newest_api_version_is_complete() -> None:
    """What was added since is promised, too: write it into the file."""
    written = FROZEN / f"api_{hookspecs.API_VERSION}.json"
    assert written.read_text(encoding="utf-8") == written_down(), written_down()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frozen_plugin_is_never_edited(version: int) -> None:
    source = (FROZEN / f"plugin_of_api_{version}.py").read_bytes()
    assert hashlib.sha256(source).hexdigest() == DIGESTS[version]


if __name__ == "__main__":
    newest = FROZEN / f"api_{hookspecs.API_VERSION}.json"
    newest.write_text(written_down(), encoding="utf-8")
