"""An error names the failed third-party plugin, its function and line; other requests continue."""

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from in_process import InProcessClient
from mlx_provider.errors import MLXProviderError, PluginError
from mlx_provider.isolation import LOG_HINT, Isolation
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.records import DraftOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.loader import load_error
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from mlx_provider.testing.scripted import Step, build, script

TOY = """
import numpy as np
from copy import copy
from dataclasses import replace
from mlx_provider import Kernels, ModelFamily, ToolParser, hookimpl
from mlx_provider.families.checkpoint import read_json
from mlx_provider.records import Drafter
from mlx_provider.testing.scripted import FAMILY, model

class Odd(BaseException): pass

def asked(text, part):
    if f"fail {part}" in text:
        raise Odd(f"no {part}")

class Toy(model.ScriptedModel):
    fault = ""
    def prepare(self, messages, **more):
        asked(str(messages), "prepare")
        prompt = super().prepare(messages, **more)
        return None if "give nothing" in prompt.text else prompt
    def make_cache(self):
        if self.fault == "cache":
            raise KeyError("cache")
        return super().make_cache()
    def prefill(self, chunk):
        asked(chunk.prompt.text, "prefill")
        return super().prefill(chunk)
    def decode(self, tokens, cache, positions, logits_at=None):
        logits = super().decode(tokens, cache, positions)
        said = np.array(cache[0].state[0].reshape(-1)).astype(int).tolist()
        text = self.tokenizer.decode(said, skip_special=False)
        asked(text, "decode")
        if "device full" in text:
            raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")
        return logits

def load(folder, options):
    fault = read_json(folder / "config.json")["fault"]
    if fault == "load":
        raise KeyError("weights")
    if fault == "none":
        return None
    if fault == "toolkit":
        read_json(folder / "config.json", 1, 2)
    if fault == "disk":
        raise OSError("disk is gone")
    loaded = FAMILY.load(folder, options)
    made = copy(loaded)
    made.__class__, made.info = Toy, replace(loaded.info, tool_parser="toy")
    made.fault = fault
    return made

def matches(config):
    if config.get("fault") == "matches":
        return config["nothing"]
    return 9 if config.get("model_type") == "toy" else 0

def detect(template):
    raise ValueError("who knows")

def parse(text, tools):
    raise IndexError("no call")

@hookimpl
def mlx_model_families():
    yield ModelFamily("toy", matches, load)

@hookimpl
def mlx_tool_parsers():
    yield ToolParser("toy", "<toy>", "</toy>", parse, detect=detect)

def start(folder, model, options):
    return options.nothing

@hookimpl
def mlx_drafters():
    yield Drafter("toy", lambda *given: "", start)

@hookimpl
def mlx_kernels():
    yield Kernels("toy", lambda device, precision: 1 / 0, lambda: ())
"""
FILE = "mlx_provider_toy.py, line "
PLUGIN = "plugin mlx_provider_toy (mlx-provider-toy 1.0): "


class Toys:
    def __init__(self, folder: Path, tiny_class: Any) -> None:
        self.registry = PluginRegistry.discover()
        self.service = ChatService(EngineSettings(), registry=self.registry)
        self._client = InProcessClient(self.service)
        self._folder, self._tiny = folder, tiny_class
        self.built = folder / "built"
        if not self.built.exists():
            build(self.built, "json", merges=2000)

    def model(self, fault: str = "") -> Any:
        """A model whose load, or each of whose passes, fails with this error."""
        folder = self._folder / (fault or "well")
        if not folder.exists():
            shutil.copytree(self.built, folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(
                json.dumps(config | {"model_type": "toy", "fault": fault})
            )
        return self._tiny(self._client, self.service, str(folder))


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory, tiny_class: Any) -> Iterator[Toys]:
    folder = tmp_path_factory.mktemp("toys")
    (folder / "mlx_provider_toy.py").write_text(TOY)
    info = folder / "mlx_provider_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-provider-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_provider]\nmlx_provider_toy = mlx_provider_toy\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        made = Toys(folder, tiny_class)
        yield made
        made.service.close()
    sys.modules.pop("mlx_provider_toy")


def fault_of(work: Callable[[], Any]) -> MLXProviderError:
    """The error that refuses or ends a request."""
    try:
        answer = work()
    except MLXProviderError as error:
        return error
    return answer.error.exception()


def test_each_plugin_failure_is_reported(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    well = toys.model()
    running = well.start(script(Step(say="all is well " * 12, slow=0.01)), max_tokens=400)
    for ask, called, cause in (
        (lambda: well.ask("fail prepare"), "Toy.prepare failed: Odd: no prepare", "in asked"),
        (lambda: well.ask("fail prefill"), "Toy.prefill failed: Odd: no prefill", "in asked"),
        (lambda: well.ask("fail decode"), "Toy.decode failed: Odd: no decode", "in asked"),
        (
            lambda: toys.model("load").ask(),
            "family 'toy', load failed: KeyError: 'weights'",
            "in load",
        ),
        (lambda: toys.model("toolkit").ask(), "family 'toy', load failed: TypeError", "in load"),
        (
            lambda: toys.model("cache").ask(),
            "family 'toy', Toy.make_cache failed: KeyError",
            "in Toy.make_cache",
        ),
    ):
        caplog.clear()
        error = fault_of(ask)
        assert isinstance(error, PluginError), error
        assert error.status == 422
        told = error.message
        assert told.startswith(PLUGIN), told
        assert called in told
        assert f"({FILE}" in told
        assert f"{cause})" in told
        assert told.endswith(LOG_HINT)
        assert "Traceback" in caplog.text
        assert 'mlx_provider_toy.py", line ' in caplog.text
    given = fault_of(lambda: toys.model("none").ask())
    assert (type(given), given.message) == (
        PluginError,
        "plugin mlx_provider_toy (mlx-provider-toy 1.0): load of 'toy' gave NoneType, "
        "no LoadedModel",
    )
    assert well.read(running).only.content == "all is well " * 12


def test_a_request_can_be_repeated_if_no_plugin_is_at_fault(toys: Toys) -> None:
    assert fault_of(lambda: toys.model("disk").ask()).status == 503
    assert fault_of(lambda: toys.model().ask("device full")).status == 500


def test_a_plugin_that_returns_no_prompt_is_reported(toys: Toys) -> None:
    error = fault_of(lambda: toys.model().ask("give nothing"))
    assert isinstance(error, PluginError)
    assert error.message == f"{PLUGIN}prepare gave NoneType, no Prompt"


def test_a_parser_that_fails_leaves_the_text(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answer = toys.model().ask(script(Step(say="a <toy>x</toy>")), tools=tools, max_tokens=60)
    assert answer.only.content == "a <toy>x</toy>"
    assert f"tool parser 'toy' failed: IndexError: no call ({FILE}" in caplog.text
    assert 'mlx_provider_toy.py", line ' in caplog.text


def test_a_failed_match_is_named_if_no_family_serves_the_model(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    error = fault_of(lambda: toys.model("matches").ask())
    assert error.status == 400
    assert "mlx_provider_toy: model family 'toy': matches failed: KeyError: 'nothing'" in str(error)
    assert "Traceback" in caplog.text


def test_failed_kernels_and_detection_are_reported(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    registry = toys.registry
    assert registry.detect_tool_parser("<none>") is None
    registry.kernels_for("cuda", "low")
    (plugin,) = [each for each in registry.plugins if each.name == "mlx_provider_toy"]
    notes = "\n".join(plugin.notes)
    assert f"tool parser 'toy': detect failed: ValueError: who knows ({FILE}" in notes
    assert f"kernels 'toy' failed: ZeroDivisionError: division by zero ({FILE}" in notes
    assert caplog.text.count("Traceback") == 2


def test_a_failed_drafter_is_named_and_not_the_family(toys: Toys) -> None:
    """The model's family can be a built-in one, which has no error."""
    with Isolation() as trying:
        toys.registry.drafter("toy").start(Path(), toys.model().served().model, DraftOptions())
    error = load_error(trying.fault, "m", "text", trusted=False, third_party="")
    assert isinstance(error, PluginError)
    assert error.message.startswith(
        f"{PLUGIN}m could not be loaded by family 'text', start failed:"
    )


def test_an_edited_family_reuses_none_of_its_old_prefixes(
    install_plugin: Any, tmp_path: Path, toys: Toys, tiny_class: Any
) -> None:
    """Stored prefixes and measurements belong to the version of the code that computed them."""
    shutil.copytree(toys.built, tmp_path / "built")
    codes = []
    for source in (TOY, TOY, f"{TOY}\n# edited\n"):
        install_plugin("mlx-provider-toy", source)
        made = Toys(tmp_path, tiny_class)
        codes.append(made.model().served(ModelOptions()).weights.code)
        made.service.close()
    assert codes[0] == codes[1] != codes[2] != ""


def test_a_failed_hook_is_reported_at_discovery(
    install_plugin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    install_plugin("mlx-provider-toy", TOY.replace("yield ToolParser", "1 / 0; yield ToolParser"))
    install_plugin("mlx-provider-bad", "def f(:")
    errors = {each.name: each.error or "" for each in PluginRegistry.discover().plugins}
    assert errors["mlx_provider_toy"].startswith(f"ZeroDivisionError: division by zero ({FILE}")
    assert errors["mlx_provider_toy"].endswith("in mlx_tool_parsers)")
    assert "SyntaxError" in errors["mlx_provider_bad"]
    assert "(mlx_provider_bad.py, line 1)" in errors["mlx_provider_bad"]
    assert caplog.text.count("Traceback") == 2
    assert not [name for name, error in errors.items() if error and name not in (
        "mlx_provider_toy", "mlx_provider_bad")]  # fmt: skip
