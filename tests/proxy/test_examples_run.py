"""The examples, as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import yaml
from litellm.proxy.types_utils.utils import get_instance_fn

import mlx_provider.litellm as ours
from mlx_provider.litellm.model_info import operator_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.upper().endswith("_PROXY")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openai_client(proxy, own_engine):
    out = run("openai_client.py", OPENAI_BASE_URL=f"{proxy.url}/v1", OPENAI_API_KEY=proxy.key)
    assert "Maria" in out
    assert "prompt tokens" in out


def test_anthropic_client(proxy, own_engine):
    out = run("anthropic_client.py", ANTHROPIC_BASE_URL=proxy.url, ANTHROPIC_AUTH_TOKEN=proxy.key)
    assert "Rome" in out


def test_sdk_script(own_engine):
    out = run("sdk_script.py")
    assert "Paris" in out
    assert "Once upon a time" in out


def test_the_proxy_config():
    path = EXAMPLES / "litellm_config.yaml"
    config = yaml.safe_load(path.read_text())
    (entry,) = config["litellm_settings"]["custom_provider_map"]
    assert get_instance_fn(entry["custom_handler"], str(path)) is ours.handler
    for model in config["model_list"]:
        assert model["litellm_params"]["model"].startswith("mlx/")
        operator_options(model)
