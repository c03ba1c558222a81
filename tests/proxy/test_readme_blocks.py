"""Every code block of the README runs as it stands, or is listed here with the reason why not.

The proxy gets the options of the reference's page, too.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from litellm_command import write_litellm
from mlx_provider.litellm.model_info import operator_options
from ports import free_port
from waiting import wait_for_proxy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = FENCED.findall(README)

CONFIG = "model_list:"
START = "export LITELLM_MASTER_KEY="
SCRIPT = "import litellm"
HERE = (CONFIG, START, SCRIPT)
OPTIONS = FENCED.findall((ROOT / "docs/reference/options.md").read_text(encoding="utf-8"))[0]
ELSEWHERE = {
    "import json": "tests/packaging/test_third_party_example.py",
    "[project]": "tests/packaging/test_third_party_example.py",
}
NOT_RUN = {
    "mlx-provider up ": "downloads a model; the demo is served by test_up_command.py",
    "mlx-provider launch": "needs Claude Code; a stand-in is launched by test_launch_command.py",
    "python3 -m venv .venv ": "installs packages; the demo is run by test_demo_command.py",
    "python3 -m venv .venv-test ": "installs packages and runs this whole suite",
    "uv run ": "needs uv, installs packages",
}
SMALL = {
    "mlx/mlx-community/Qwen3-VL-8B-Instruct-4bit": "mlx/demo"  # nothing is downloaded
}


def block(start):
    (found,) = (text for text in BLOCKS if text.startswith(start))
    return found


def test_every_block_has_its_place():
    known = (*HERE, *ELSEWHERE, *NOT_RUN)
    assert [sum(text.startswith(start) for start in known) for text in BLOCKS] == [1] * len(known)
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


def test_the_operators_options_are_valid():
    options = operator_options(yaml.safe_load(OPTIONS))
    assert (options.kv_bits, options.cache_salt) == (8, "team")


@pytest.fixture
def folder(tmp_path):
    """The README's config."""
    config = block(CONFIG).replace("litellm_settings:\n", f"{OPTIONS}litellm_settings:\n")
    for large, small in SMALL.items():
        assert large in config
        config = config.replace(large, small)
    (tmp_path / "config.yaml").write_text(config)
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")  # LiteLLM's own
def test_the_config_the_command_and_the_script(folder, own_engine):
    port = free_port()
    own = {k: v for k, v in os.environ.items() if not k.startswith(("LITELLM_", "DATABASE_"))}
    paths = f"{write_litellm(folder)}:{Path(sys.executable).parent}:{own['PATH']}"
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}  # no network
    environ = {**own, **local, "PATH": paths, "PORT": str(port)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-ec", block(START)],
            cwd=folder,
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        with process:
            try:
                exec(block(SCRIPT), {})  # meanwhile, through the engine that both use
                answer = asked(f"http://127.0.0.1:{port}", folder, process)
            finally:
                os.killpg(process.pid, signal.SIGTERM)
    assert "Paris" in answer


def asked(url, folder, process):
    """The answer of the README's model, once its proxy is up."""
    wait_for_proxy(url, process, folder / "log")
    name = yaml.safe_load(block(CONFIG))["model_list"][0]["model_name"]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    headers = {"authorization": f"Bearer {(folder / 'key').read_text()}"}
    reply = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=300
    )
    assert reply.is_success, reply.text
    return reply.text
