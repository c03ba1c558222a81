"""What an engine process imports until it has answered, and that nothing is missed of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_provider.client.connection import Connections
from mlx_provider.gateway.engine import end_engine, warm_up

NOT_NEEDED = (
    "mlx_lm.convert",
    "mlx_lm.generate",
    "mlx_vlm.convert",
    "mlx_vlm.generate",
    "mlx_vlm.trainer.api",
    "mlx_vlm.trainer.vlm",
    "requests.api",
    "urllib3",
    "rich",
    "pygments",
    "typer",
    "cv2",
    "datasets",
    "pandas",
    "llguidance",
    "litellm",
    "torch",
    "mlx_provider_bench.commands",
    "mlx_provider_eval.commands",
    "mlx_provider_gemma3.model",
)
WHOLE = """
import sys
from mlx_provider.upstream.runtime import lean_packages
lean_packages()
import mlx_lm.utils, mlx_lm.models.cache
assert "mlx_lm.convert" not in sys.modules
from mlx_lm import generate, load
assert load is mlx_lm.utils.load and generate.__name__ == "generate" and callable(generate)
assert not hasattr(mlx_lm, "nothing") and mlx_lm.__version__
try:
    import mlx_lm.nothing
except ModuleNotFoundError as error:
    assert error.name == "mlx_lm.nothing"
else:
    raise AssertionError
import mlx_vlm, requests, httpx
import mlx_vlm.trainer.peft.utils
assert "mlx_vlm.trainer.api" not in sys.modules
from mlx_vlm.trainer import Trainer, peft
assert Trainer is mlx_vlm.trainer.api.Trainer and peft is mlx_vlm.trainer.peft
assert callable(mlx_vlm.generate) and callable(requests.get) and requests.exceptions.Timeout
httpx.Client(trust_env=False).close()
"""
ONCE = """
import collections, sys
from mlx_provider.upstream.runtime import lean_packages
lean_packages()
read = collections.Counter()
sys.addaudithook(lambda event, what: event == "open" and read.update([str(what[0])]))
from transformers import AutoTokenizer, BertConfig
assert max(count for path, count in read.items() if path.endswith("modeling_albert.py")) == 1
import transformers.models
assert "BertConfig" in dir(transformers.models.bert)
assert transformers.models.BertConfig is BertConfig
assert not hasattr(transformers.models, "nothing")
"""
AT_ONCE = """
import threading
from mlx_provider.upstream.runtime import lean_packages
lean_packages()
import requests
at_once, found = threading.Barrier(8), []
def ask():
    at_once.wait()
    found.append(requests.get)
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8
"""


def test_an_engine_imports_what_it_uses(tmp_path: Path) -> None:
    own = {
        **os.environ,
        "MLX_PROVIDER_RUNTIME_DIR": os.environ["MLX_PROVIDER_RUNTIME_DIR"] + "/lean",
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    connections = Connections(own)
    engine = connections.client(None, None)
    try:
        warm_up(engine, "demo")
        log = Path(own["MLX_PROVIDER_RUNTIME_DIR"], "engine.log").read_text()
    finally:
        end_engine(engine)
        connections.close()
    lines = [line.rpartition("|") for line in log.splitlines() if line.startswith("import time:")]
    imported = {name.strip() for _, _, name in lines}
    assert "mlx_lm.utils" in imported
    assert imported.isdisjoint(NOT_NEEDED), sorted(imported.intersection(NOT_NEEDED))


@pytest.mark.parametrize("program", [WHOLE, ONCE, AT_ONCE], ids=["whole", "once", "at once"])
def test_whoever_asks_for_more_gets_it(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
