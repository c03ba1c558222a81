"""The dashboard asks for nothing that no engine tells."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.protocol.health import EngineStats, Stats
from mlx_provider.serving.metrics import EngineMetrics

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "examples" / "grafana" / "mlx-provider.json").read_text("utf-8")
)
TARGETS = [(p["title"], t["expr"]) for p in DASHBOARD["panels"] for t in p["targets"]]
VARIABLES = [
    variable["query"]["query"]
    for variable in DASHBOARD["templating"]["list"]
    if variable["type"] == "query"
]


@pytest.fixture(scope="module")
def exposed() -> str:
    """What an engine with one model tells: every metric, with its type."""
    engine = EngineStats(model="m", layout="solo", mixes=False, queued=0, rows=0, drafter="d")
    stats = Stats(at=0, version="1", device="d", pid=1, engines=[engine])
    return EngineMetrics(lambda: stats).exposition().decode()


def series(exposed: str) -> set[str]:
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", exposed, re.MULTILINE):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + end for end in ends}
    return found


@pytest.mark.parametrize("expression", [expr for _, expr in TARGETS] + VARIABLES)
def test_every_expression_names_metrics_that_exist(expression: str, exposed: str) -> None:
    named = set(re.findall(r"\bmlx_provider_\w+", expression))
    assert named, "it asks for nothing of ours"
    assert named <= series(exposed), named - series(exposed)


def test_panels_have_a_title_and_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
