"""Workflows do what the project's own commands do, with no more rights than they need."""

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
FLOWS: dict[str, dict[str, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {(flow, job): FLOWS[flow]["jobs"][job] for flow in FLOWS for job in FLOWS[flow]["jobs"]}
PUBLISHES = ("release", "publish")

every_job = pytest.mark.parametrize("name", JOBS, ids="/".join)


@pytest.mark.parametrize("flow", FLOWS)
def test_every_workflow_has_read_permission_only_and_a_concurrency_group(flow: str) -> None:
    assert FLOWS[flow]["permissions"] == {"contents": "read"}
    assert FLOWS[flow]["concurrency"]["group"]
    assert "secrets." not in TEXTS[flow]


@every_job
def test_every_job_has_a_time_limit_and_pinned_actions(name: tuple[str, str]) -> None:
    job = JOBS[name]
    if "uses" in job:
        assert job["uses"].startswith("./")
        return
    assert job["timeout-minutes"]
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert [each for each in used if not re.search(r"@(v\d+\.\d+\.\d+|[0-9a-f]{40})$", each)] == []
    checkouts = [s for s in job["steps"] if s.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@every_job
def test_only_the_publishing_job_has_an_id_token(name: tuple[str, str]) -> None:
    rights = JOBS[name].get("permissions", {})
    assert ("id-token" in rights) == (name == PUBLISHES)
    if name == PUBLISHES:
        assert JOBS[name]["environment"]
        assert not any("actions/checkout" in step["uses"] for step in JOBS[name]["steps"])


def test_no_workflow_script_expands_github_event_values() -> None:
    scripts = [step.get("run", "") for job in JOBS.values() for step in job.get("steps", [])]
    assert [script for script in scripts if "${{ github." in script] == []


def test_the_suite_runs_on_both_systems_with_the_oldest_and_newest_python() -> None:
    suite = JOBS["tests", "suite"]
    runs = suite["strategy"]["matrix"]["include"]
    assert {each["os"].split("-")[0] for each in runs} == {"ubuntu", "macos"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest, after = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project).groups()
    assert {f"3.{oldest}", f"3.{int(after) - 1}"} <= {each["python"] for each in runs}
    assert ".ci/run" in [step.get("run") for step in suite["steps"]]


def test_every_tox_environment_named_in_a_workflow_exists() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    known = {name.removeprefix("testenv:") for name in tox.sections()} | {"py", "agents"}
    known |= {"litellm1106", "litellm1109", "litellm1110"}
    named = set(JOBS["weekly", "edges"]["strategy"]["matrix"]["env"])
    for text in TEXTS.values():
        named |= set(re.findall(r"\btox -e (\w+)", text))
    assert named <= known
