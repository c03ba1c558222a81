"""The tables of `docs/` say what the code says. A failing test prints the table to paste."""

import inspect
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import typer
from starlette.routing import Route

from mlx_provider import config, hookspecs
from mlx_provider.doctor.versions import TESTED
from mlx_provider.errors import error_classes
from mlx_provider.protocol.requests import OperatorOptions
from mlx_provider.records import Client, Drafter, Kernels, ModelFamily, ReasoningParser, ToolParser
from mlx_provider.registry.contents import Contents, load, names
from mlx_provider.server.app import EngineApp
from mlx_provider.settings import SETTING_NAMES, EngineSettings

ROOT = Path(__file__).parents[2]
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

OTHER_VARIABLES = {
    "MLX_PROVIDER_PLUGINS": "",
    "MLX_PROVIDER_RUNTIME_DIR": "",
    "MLX_PROVIDER_API_KEY": "",
}
"""Variables that are no field of `EngineSettings`, with their defaults."""


def table(title: str) -> list[str]:
    """The lines of the one table of this name in all pages."""
    written = re.compile(rf"<!-- {title}: .*? -->\n(.*?)\n?<!-- end -->", re.DOTALL)
    found = [match[1] for text in PAGES.values() for match in written.finditer(text)]
    assert len(found) == 1, f"{len(found)} tables {title!r} in docs/"
    return found[0].split("\n")


def test_the_table_of_hooks_equals_the_hook_specifications() -> None:
    expected = ["| hook | for |", "|---|---|"]
    for name, spec in hooks().items():
        arguments = ", ".join(inspect.signature(spec).parameters)
        expected.append(f"| `{name}({arguments})` | {first_sentence(spec.__doc__)} |")
    assert table("hooks") == expected, "\n".join(expected)


def test_the_table_of_plugins_equals_the_installed_records() -> None:
    expected = ["| plugin | records |", "|---|---|"]
    for name, module in PROJECT["entry-points"]["mlx_provider"].items():
        contents = load(EntryPoint(name, module, "mlx_provider"))
        brings = [family.serves for family in contents.of(ModelFamily)]
        brings += listed("tool parsers", [parser.name for parser in contents.of(ToolParser)])
        brings += listed("reasoning parsers", [p.name for p in contents.of(ReasoningParser)])
        brings += [f"kernels {kernels.serves}" for kernels in contents.of(Kernels)]
        brings += [f"drafter `{each.name}`: {each.serves}" for each in contents.of(Drafter)]
        brings += listed("clients", [client.name for client in contents.of(Client)])
        brings += listed("command", commands(contents))
        expected.append(f"| `{name}` | {'; '.join(brings)} |")
    assert table("plugins") == expected, "\n".join(expected)


def test_the_table_of_variables_equals_the_engine_settings() -> None:
    expected = {
        config.PREFIX + name.upper(): shown(EngineSettings.model_fields[name].default)
        for name in SETTING_NAMES
    }
    assert names_and_defaults("environment") == expected | OTHER_VARIABLES
    assert len(expected | OTHER_VARIABLES) <= 14, "a new variable replaces another"


def test_every_variable_that_the_code_reads_is_in_the_table() -> None:
    written = re.compile(r'MLX_PROVIDER_[A-Z][A-Z_]*[A-Z]|(?<=PREFIX \+ ")[A-Z_]+')
    read: set[str] = set()
    for path in (ROOT / "mlx_provider").rglob("*.py"):
        for name in written.findall(path.read_text(encoding="utf-8")):
            read.add(name if name.startswith(config.PREFIX) else config.PREFIX + name)
    assert OTHER_VARIABLES.keys() <= read <= names_and_defaults("environment").keys()


def test_the_table_of_operator_options_equals_the_model() -> None:
    expected = {
        name: shown(field.get_default(call_default_factory=True))
        for name, field in OperatorOptions.model_fields.items()
    }
    assert names_and_defaults("options") == expected
    assert len(expected) <= 18, "a new option replaces another"


def test_the_table_of_clients_equals_the_client_records() -> None:
    contents = load(EntryPoint("clients", "mlx_provider_clients", "mlx_provider"))
    expected = ["| name | agent | install |", "|---|---|---|"]
    expected += [f"| `{c.name}` | {c.title} | `{c.install}` |" for c in contents.of(Client)]
    assert table("clients") == expected, "\n".join(expected)


def test_the_table_of_errors_equals_the_error_classes() -> None:
    classes = sorted(error_classes().values(), key=lambda cls: (cls.status, cls.code))
    means = {cls.code: first_sentence(cls.__doc__) for cls in classes}
    means["internal_error"] = "Internal error; the engine's log has the traceback"
    expected = ["| code | status | meaning |", "|---|---|---|"]
    expected += [f"| `{cls.code}` | {cls.status} | {means[cls.code]} |" for cls in classes]
    assert table("errors") == expected, "\n".join(expected)


def test_the_table_of_packages_equals_the_tested_versions() -> None:
    expected = ["| package | allowed | newest tested series |", "|---|---|---|"]
    for each in TESTED:
        expected.append(f"| {each.package} | `{each.allowed}` | {each.newest_series} |")
    assert table("packages") == expected, "\n".join(expected)


def test_the_table_of_routes_equals_those_of_the_engine() -> None:
    app = EngineApp(None)
    expected = {
        f"{method} {route.path}"
        for route in app.asgi.routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert {line.strip("|").split("|")[0].strip(" `") for line in table("routes")[2:]} == expected


def names_and_defaults(title: str) -> dict[str, str]:
    rows = [line.strip("|").split("|") for line in table(title)[2:]]
    return {name.strip(" `"): default.strip() for name, default, _ in rows}


def hooks() -> dict[str, object]:
    return {
        name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "mlx_provider_spec")
    }


def commands(contents: Contents) -> list[str]:
    cli = typer.Typer()
    contents.manager.hook.mlx_register_commands(cli=cli)
    return sorted(names(cli))


def listed(kind: str, names: list[str]) -> list[str]:
    return [f"{kind} {', '.join(f'`{name}`' for name in names)}"] if names else []


def first_sentence(doc: str | None) -> str:
    return (doc or "").strip().split(".")[0]


def shown(value: object) -> str:
    if value in (None, {}, [], ()):
        return ""
    if isinstance(value, int) and value >= 2**30:
        return f"{value // 2**30}G"
    if isinstance(value, int) and value >= 2**20:
        return f"{value // 2**20}M"
    return str(value).lower() if isinstance(value, bool) else str(value)
