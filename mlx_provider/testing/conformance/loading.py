"""Any plugin: it loads, and its listing stays light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from ...records import ReasoningParser, ToolParser
from ...registry import Plugin
from ...registry.contents import Contents
from .check import Check, demand, same

HEAVY = ("litellm", "mlx", "mlx_lm", "mlx_vlm", "transformers", "torch", "huggingface_hub", "typer")
"""Packages whose import takes tenths of seconds to seconds."""
ODD_CONFIGS: Sequence[dict[str, object]] = (
    {},
    {"model_type": "an_architecture_that_nobody_has"},
    {"model_type": None, "architectures": None},
    {"model_type": 7, "text_config": [], "vision_config": "none"},
    {"text_config": {"model_type": "an_architecture_that_nobody_has"}, "vision_config": {}},
)
LISTING = """
import json, sys
from importlib.metadata import EntryPoint
from mlx_provider.registry.contents import load
contents = load(EntryPoint(*sys.argv[1:4]))
for parser in (*contents.tool_parsers, *contents.reasoning_parsers):
    parser.detect("{{ messages }}")
print("LOADED " + json.dumps(sorted(set(sys.argv[4:]) & set(sys.modules))))
"""


@dataclass(frozen=True)
class Installed:
    plugin: Plugin
    entry_point: EntryPoint
    contents: Contents | None
    """`None`: it does not load."""


def loads(installed: Installed) -> None:
    demand(installed.plugin.error is None, f"it is skipped whole: {installed.plugin.error}")
    notes = "; ".join(installed.plugin.notes)
    demand(not notes, f"mlx-provider plugins notes: {notes}")


def import_weight(installed: Installed) -> None:
    point = installed.entry_point
    done = subprocess.run(
        [sys.executable, "-c", LISTING, point.name, point.value, point.group, *HEAVY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    demand(bool(summary), f"it could not be listed in a process of its own: {done.stderr[-500:]}")
    heavy = json.loads(summary[-1].removeprefix("LOADED "))
    same(heavy, [], "listing it imports heavy packages: import them where they are used")


def recognition(installed: Installed) -> None:
    if installed.contents is None:
        return
    for family in installed.contents.model_families:
        for config in ODD_CONFIGS:
            same(family.matches(config), 0, f"family {family.name!r} claims {config}")
    parsers: Sequence[ToolParser | ReasoningParser] = (
        *installed.contents.tool_parsers,
        *installed.contents.reasoning_parsers,
    )
    for parser in parsers:
        for template in ("", "{{ messages }}", "{% for message in messages %}{{ message }}"):
            summary = f"parser {parser.name!r} claims the chat template {template!r}"
            demand(not parser.detect(template), summary)


CHECKS: tuple[Check[Installed], ...] = (
    Check("loads", "It loads, its hooks run, and no name of it clashes with another's.", loads),
    Check("import weight", f"Listing it imports none of {', '.join(HEAVY)}.", import_weight),
    Check(
        "recognition",
        "`matches` and `detect` take any config and any template, and claim none that is nobody's.",
        recognition,
    ),
)
