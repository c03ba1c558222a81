"""Run real clients against scripted models: `tox -e agents`."""

import argparse
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path

import python_clients
import results
import scenarios
import table
from clients import AGENTS
from gateway import Gateway, gateway
from installed import Installed, install, version
from scenarios import Outcome, Setting

from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.foreground import ending_by_signal

HERE = Path(__file__).parent
CLIENTS = tuple(each.name for each in (*AGENTS, *python_clients.LIBRARIES))
SCENARIOS = ("plain", "tools", "cancel", "full", "prefill")


def main() -> int:
    chosen = _arguments()
    installed = install(chosen.folder.resolve())
    try:
        # With handlers here, clients do not inherit that a shell's background ignores Ctrl-C.
        with ending_by_signal(), gateway(chosen.calls, chosen.logs) as running:
            agents = _agents(chosen, running, installed)
            libraries = _libraries(chosen, running, installed)
    except EngineUnavailable as error:
        print(error.message, file=sys.stderr)
        return 1
    found = agents | {name: {"library": outcome} for name, outcome in libraries.items()}
    versions = _versions(chosen.calls)
    kept = chosen.folder / f"found with LiteLLM {installed_version('litellm')}.json"
    text = table.written(versions, chosen.prefill, results.merged(kept, found))
    print(text)
    committed = HERE / "CLIENTS.md"
    changed = table.changes(committed.read_text(encoding="utf-8"), found)
    if chosen.write:
        committed.write_text(text, encoding="utf-8")
    for change in changed:
        print(f"not as in {committed.name}: {change}", file=sys.stderr)
    return int(bool(changed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agents", description=__doc__)
    temporary = Path(tempfile.gettempdir()) / "mlx-provider-agents"
    parser.add_argument("--folder", type=Path, default=temporary, help="where clients are put")
    parser.add_argument(
        "--client",
        action="append",
        choices=CLIENTS,
        metavar="NAME",
        help="only this one; repeatable",
    )
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="repeatable")
    parser.add_argument("--calls", default="tags", help="how the model writes calls: tags or json")
    parser.add_argument("--prefill", type=float, default=400, help="seconds of the long prefill")
    parser.add_argument("--logs", type=Path, help="keep the logs of engine and proxy here")
    parser.add_argument(
        "--write", action="store_true", help="write CLIENTS.md, with what earlier runs found"
    )
    return parser.parse_args()


def _versions(calls: str) -> str:
    ours, litellm = (installed_version(name) for name in ("mlx-provider", "litellm"))
    return f"mlx-provider {ours}, LiteLLM {litellm}, calls as {calls}"


def _wanted(name: str, chosen: argparse.Namespace) -> bool:
    return chosen.client is None or name in chosen.client


def _agents(
    chosen: argparse.Namespace, running: Gateway, installed: Installed
) -> dict[str, dict[str, Outcome]]:
    agents = [agent for agent in AGENTS if _wanted(agent.name, chosen)]
    wanted = set(chosen.scenario or SCENARIOS)
    settings = {
        f"{agent.name} {version(agent.package)}": Setting(agent, running, installed)
        for agent in agents
    }
    found = {name: _scenarios(setting, wanted) for name, setting in settings.items()}
    if "prefill" in wanted and settings:
        outcomes = scenarios.prefills(list(settings.values()), chosen.prefill)
        for name, setting in settings.items():
            found[name]["prefill"] = _told(name, "prefill", outcomes[setting.agent.name])
    return found


def _scenarios(setting: Setting, wanted: set[str]) -> dict[str, Outcome]:
    """One client after another: they are given the whole machine."""
    name, cells = setting.agent.name, {}
    if "plain" in wanted:
        cells["plain"] = _told(name, "plain", scenarios.plain(setting))
    if "cancel" in wanted:
        cells["cancel"] = _told(name, "cancel", scenarios.cancel(setting))
    if setting.agent.shell is None:
        return cells
    if "tools" in wanted:
        cells["tools"], cells["cached"] = scenarios.tools(setting)
        _told(name, "tools", cells["tools"])
        _told(name, "cached", cells["cached"])
    if "full" in wanted:
        for column in ("told", "untold"):
            outcome = scenarios.full(setting, told=column == "told")
            cells[column] = _told(name, f"full, {column}", outcome)
    return cells


def _libraries(
    chosen: argparse.Namespace, running: Gateway, installed: Installed
) -> dict[str, Outcome]:
    if chosen.scenario and "tools" not in chosen.scenario:
        return {}
    found = {}
    for library in python_clients.LIBRARIES:
        if _wanted(library.name, chosen):
            outcome = python_clients.run(library, running, installed)
            found[f"{library.name} ({_version_of(library)})"] = outcome
            _told(library.name, "tools", outcome)
    return found


def _version_of(library: python_clients.Library) -> str:
    if library.environment == "gateway":
        return installed_version(library.package)
    return version(library.package, library.environment)


def _told(name: str, what: str, outcome: Outcome) -> Outcome:
    mark = "ok  " if outcome.good else "FAIL"
    print(f"{mark} {name}, {what}: {outcome.told}", file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
