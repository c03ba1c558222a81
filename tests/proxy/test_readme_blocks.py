"""Every code block of the README runs as it stands, or is listed here with the reason why not.

The proxy of this folder has the README's config and is started as the README says."""

import httpx
import pytest
import yaml

from mlx_provider.litellm.model_info import operator_options
from readme import BLOCKS, CONFIG, OPTIONS, ROOT, SCRIPT, START, block

HERE = (CONFIG, START, SCRIPT)
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


def test_every_readme_block_is_run_or_listed_with_the_reason():
    known = (*HERE, *ELSEWHERE, *NOT_RUN)
    assert [sum(text.startswith(start) for start in known) for text in BLOCKS] == [1] * len(known)
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


def test_the_operator_options_in_the_readme_are_valid():
    options = operator_options(yaml.safe_load(OPTIONS))
    assert (options.kv_bits, options.cache_salt) == (8, "team")


@pytest.mark.filterwarnings("ignore::UserWarning")  # LiteLLM's own
def test_the_script(own_engine):
    exec(block(SCRIPT), {})


def test_the_config_and_the_command(raw: httpx.Client, own_engine):
    name = yaml.safe_load(block(CONFIG))["model_list"][0]["model_name"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": name, "messages": messages, "temperature": 0}
    reply = raw.post("/v1/chat/completions", json=body)
    assert reply.is_success, reply.text
    assert "Paris" in reply.text
