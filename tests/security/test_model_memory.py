"""Many clients, more models than memory: the limit holds, all are answered, nothing is stuck."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from in_process import InProcessClient
from mlx_provider.errors import BadRequest, LoadFailed, MemoryInUse, RequestFailed
from mlx_provider.protocol.events import Done, Event
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions, Sampling
from mlx_provider.serving import engine_builder
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from tiny import build
from waiting import PATIENCE, wait_until

MODELS, CLIENTS, REQUESTS = 4, 10, 1
LIMIT = 14_200_000
TIGHT = 10_400_000
"""Room for two models and 1,300 tokens, or for one and 7,300."""
STEP = 3_500_000
"""Bytes that the passes take by which a model is probed while others are in memory."""
PASS = 250_000
"""Bytes of one pass of such requests and its row; chunks are small."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of 4.6 MB each."""
    root = tmp_path_factory.mktemp("models")
    size = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3}
    return [build(root / f"m{i}", "qwen3", seed=i, **size) for i in range(MODELS)]


@pytest.fixture(scope="module")
def one_measurement(folders: list[Path]) -> dict[str, Any]:
    """What a load finds out about a model of `folders`, by function, in free memory."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("probe", "calibrate"):
            original = getattr(engine_builder, name)

            def keep(*args: Any, name: str = name, original: Any = original) -> Any:
                return found.setdefault(name, original(*args))

            patch.setattr(engine_builder, name, keep)
        settings = EngineSettings(kv_layout="solo", max_chunk=16, measurements="off")
        client = InProcessClient(ChatService(settings))
        ask(client, folders[0])
        client.close()
    return found


@pytest.fixture
def reuse_measurement(one_measurement: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No load times passes, which takes most of it."""
    for name, result in one_measurement.items():
        monkeypatch.setattr(engine_builder, name, lambda *args, result=result: result)


MakeClient = Callable[..., InProcessClient]


@pytest.fixture
def connect() -> Iterator[MakeClient]:
    made: list[InProcessClient] = []

    def make(**settings: Any) -> InProcessClient:
        # without layouts to try, a model loads in a tenth of the time
        settings = {"kv_layout": "solo", "max_chunk": 16} | settings
        made.append(InProcessClient(ChatService(EngineSettings(**settings))))
        return made[-1]

    yield make
    for client in made:
        client.close()


def ask(
    client: InProcessClient, folder: Path, text: str = "Hello", max_tokens: int = 6, **more: Any
) -> list[Event]:
    """Every event of one request."""
    messages = [{"role": "user", "content": text}]
    sampling = Sampling(temperature=0, logit_bias=dict.fromkeys(range(8), -100.0))
    request = GenerateRequest(
        model=str(folder), messages=messages, max_tokens=max_tokens, sampling=sampling, **more
    )
    generation = client.submit(request)
    found: list[Event] = []
    while events := generation.get(PATIENCE):
        found += events
    return found


def tokens(events: list[Event]) -> int:
    last = events[-1]
    assert isinstance(last, Done), last
    return last.usage.completion_tokens


def loaded(client: InProcessClient) -> set[str]:
    return {Path(status.model).name for status in client.health().models}


def test_many_clients_of_more_models_than_memory_stay_within_the_limit(
    connect: MakeClient, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(memory_limit=LIMIT, model_wait=PATIENCE)
    at_rest = mx.get_active_memory()
    mx.reset_peak_memory()
    peaks: list[int] = []
    reset = mx.reset_peak_memory  # a model that comes measures its passes
    monkeypatch.setattr(
        mx, "reset_peak_memory", lambda: (peaks.append(mx.get_peak_memory()), reset())
    )

    def one_client(number: int) -> list[str]:
        outcomes = []
        for step in range(REQUESTS):
            try:
                folder = folders[(number * 5 + step) % MODELS]
                outcomes.append(type(ask(client, folder, "word " * (number + 1))[-1]).__name__)
            except MemoryInUse as refused:
                outcomes.append("later" if refused.retry_after else refused.message)
        return outcomes

    with ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = [each for found in pool.map(one_client, range(CLIENTS)) for each in found]
    assert len(outcomes) == CLIENTS * REQUESTS
    assert set(outcomes) <= {"Done", "later"}
    assert outcomes.count("Done") > len(outcomes) // 2
    assert max(*peaks, mx.get_peak_memory()) - at_rest < LIMIT + STEP
    wait_until(lambda: client.health().running == 0)
    assert mx.get_active_memory() - at_rest <= LIMIT
    for folder in folders[::3]:  # it serves whatever is asked for when idle, too
        assert tokens(ask(client, folder)) == 6
    assert mx.get_active_memory() - at_rest <= LIMIT


OTHERS = ("gpt_oss", "qwen3_5", "qwen2_vl")


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "nemotron_h", "qwen3_vl", "gemma3"),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS),
    ],
)
def test_an_unloaded_model_gives_its_memory_back(
    family: str, connect: MakeClient, tmp_path: Path
) -> None:
    """Also with a grammar, a tool parser and stored prefixes that have seen it."""
    first, second = (build(tmp_path / f"m{i}", family, seed=i) for i in range(2))
    size = sum(path.stat().st_size for path in first.glob("*.safetensors"))
    client = connect(memory_limit=int(1.2 * size) + PASS)
    gc.collect()  # what other tests have left is not to go meanwhile
    before = mx.get_active_memory()
    ask(client, first, response_format={"type": "json_object"})
    client.cache_clear()
    one = mx.get_active_memory() - before
    ask(client, second)
    client.cache_clear()
    assert loaded(client) == {"m1"}
    assert mx.get_active_memory() - before < 1.05 * one


def test_prefixes_of_an_unloaded_model_are_found_again(
    connect: MakeClient, folders: list[Path], reuse_measurement: None
) -> None:
    client = connect(memory_limit=int(1.9 * 4_600_000))
    text = "The same long beginning of a question. " * 4
    ask(client, folders[0], text)
    ask(client, folders[1], text)
    assert loaded(client) == {"m1"}
    last = ask(client, folders[0], text)[-1]
    assert isinstance(last, Done)
    assert last.usage.cached_tokens > 100


def test_a_closed_service_gives_its_memory_back(folders: list[Path]) -> None:
    """At once, so that an engine thread that follows a dead one does not find it taken."""
    before = mx.get_active_memory()
    client = InProcessClient(ChatService(EngineSettings(kv_layout="solo")))
    ask(client, folders[0])
    gc.collect()
    gc.disable()
    try:
        client.close()
        assert mx.get_active_memory() - before < 1_000_000
    finally:
        gc.enable()


def test_a_failed_load_leaves_no_memory_reserved(connect: MakeClient, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3")
    (folder / "tokenizer.json").write_text("{}")
    client = connect()
    before = mx.get_active_memory()
    for _ in range(2):
        with pytest.raises(LoadFailed):
            ask(client, folder)
    assert mx.get_active_memory() <= before + 64  # MLX's own random key, where nobody drew before
    assert client.service.models.ledger.free == client.service.models.ledger.limit


def test_model_code_with_a_syntax_error_fails_only_its_load(
    connect: MakeClient, folders: list[Path], tmp_path: Path
) -> None:
    """A `SyntaxError` must not end the engine thread."""
    folder = build(tmp_path / "m", "qwen3")
    (folder / "model.py").write_text("this is no python")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"model_file": "model.py",', 1))
    client = connect()
    ask(client, folders[0])
    with pytest.raises(LoadFailed, match="SyntaxError"):
        ask(client, folder, options=ModelOptions(trust_remote_code=True))
    assert loaded(client) == {"m0"}


def test_a_prompt_that_needs_the_memory_of_idle_models_unloads_them(
    connect: MakeClient, folders: list[Path], reuse_measurement: None
) -> None:
    client = connect(memory_limit=TIGHT)
    for folder in folders[:2]:
        ask(client, folder)
    assert loaded(client) == {"m0", "m1"}
    assert tokens(ask(client, folders[1], "word " * 400)) == 6
    assert loaded(client) == {"m1"}
    with pytest.raises(BadRequest, match=r"needs \d+ bytes of cache; the memory limit leaves \d+"):
        ask(client, folders[1], "word " * 3000)
    assert tokens(ask(client, folders[1])) == 6


def test_a_prompt_waits_while_the_model_in_its_way_is_in_use(
    connect: MakeClient,
    folders: list[Path],
    reuse_measurement: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect(memory_limit=TIGHT, model_wait=0.2)
    ask(client, folders[0])
    (served,) = client.service.models.views()
    step = served.engine.step
    monkeypatch.setattr(served.engine, "step", lambda: time.sleep(0.001) or [])  # it goes on
    running = client.submit(
        GenerateRequest(
            model=str(folders[0]), prompt="x", sampling=Sampling(temperature=0), max_tokens=4000
        )
    )
    with pytest.raises(MemoryInUse) as refused:
        ask(client, folders[1], "word " * 400)
    assert refused.value.retry_after
    monkeypatch.setattr(served.engine, "step", step)
    running.close()
    wait_until(lambda: client.health().running == 0)
    assert tokens(ask(client, folders[1], "word " * 400)) == 6


def test_a_row_that_outgrows_the_memory_unloads_an_idle_model(
    connect: MakeClient, folders: list[Path], reuse_measurement: None
) -> None:
    """The row is not cut short because of weights that no request uses."""
    client = connect(memory_limit=TIGHT, output_reserve=16)
    for folder in folders[:2]:
        ask(client, folder)
    assert loaded(client) == {"m0", "m1"}
    assert tokens(ask(client, folders[0], "word " * 270, max_tokens=400)) == 400
    assert loaded(client) == {"m0"}


def test_a_disconnected_client_is_removed_while_waiting_or_loading(
    connect: MakeClient, folders: list[Path], reuse_measurement: None
) -> None:
    """In line, while its model loads, and after its model has gone."""
    client = connect(memory_limit=TIGHT // 2)
    done = GenerateRequest(model=str(folders[0]), prompt="x", max_tokens=2)
    first = client.submit(done)
    while first.get(PATIENCE):
        pass
    (served,) = client.service.models.views()
    step, may_go_on = served.engine.step, threading.Event()
    served.engine.step = lambda: (may_go_on.wait(PATIENCE), step())[1]  # it must not end before
    running = client.submit(
        GenerateRequest(
            model=str(folders[0]),
            prompt="x",
            sampling=Sampling(logit_bias=dict.fromkeys(range(8), -100.0)),
            max_tokens=300,
        )
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client, folders[1], id="gone")
        wait_until(lambda: bool(client.service.models.queue.waiting))
        client.service.cancel("gone")
        with pytest.raises(RequestFailed, match="its own client"):
            waiting.result(PATIENCE)
    may_go_on.set()
    running.close()
    assert tokens(ask(client, folders[2])) == 6
    assert loaded(client) == {"m2"}
    client.service.cancel(done.id)
    first.close()
    running.close()
