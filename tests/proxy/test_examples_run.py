"""The examples, as they stand."""

import os
import runpy
from pathlib import Path

import pytest
import yaml
from litellm.proxy.types_utils.utils import get_instance_fn

import mlx_provider.litellm as ours
from mlx_provider.litellm.model_info import operator_options
from python_process import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


HEAVY = {"mlx", "mlx_lm", "mlx_vlm", "transformers"}
"""What a gateway's process must not load."""
CODE = f"""
import gc, runpy, sys

gc.disable()  # a fifth of the time of LiteLLM's import
runpy.run_path(sys.argv[1])
print(sorted({HEAVY} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("name", "path", "key", "said"),
    [
        ("openai", "/v1", "API_KEY", ["Maria", "prompt tokens"]),
        ("anthropic", "", "AUTH_TOKEN", ["Rome"]),
    ],
)
def test_example_clients_get_answers(proxy, own_engine, capsys, monkeypatch, name, path, key, said):
    for variable in [each for each in os.environ if each.upper().endswith("_PROXY")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(f"{name.upper()}_BASE_URL", proxy.url + path)
    monkeypatch.setenv(f"{name.upper()}_{key}", proxy.key)
    runpy.run_path(str(EXAMPLES / f"{name}_client.py"))
    out = capsys.readouterr().out
    assert [each for each in said if each not in out] == []


def test_a_script_with_the_handler_loads_no_engine(own_engine):
    out = run_python(CODE, EXAMPLES / "sdk_script.py").stdout
    assert "Paris" in out
    assert "Once upon a time" in out
    assert out.splitlines()[-1] == "[]"


def test_the_example_proxy_config_names_the_handler_and_valid_options():
    path = EXAMPLES / "litellm_config.yaml"
    config = yaml.safe_load(path.read_text())
    (entry,) = config["litellm_settings"]["custom_provider_map"]
    assert get_instance_fn(entry["custom_handler"], str(path)) is ours.handler
    for model in config["model_list"]:
        assert model["litellm_params"]["model"].startswith("mlx/")
        operator_options(model)
