"""A service in this process: text, limits, failures, models."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.generation import Generation
from mlx_provider.errors import (
    BadRequest,
    ContextTooLong,
    EngineUnavailable,
    MemoryInUse,
    MLXProviderError,
    ModelNotFound,
    Overloaded,
    RequestFailed,
    UnsupportedModel,
)
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import ErrorBody, Failed
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions, Sampling
from waiting import wait_until

QUIET = dict.fromkeys(range(8), -100.0)
"""The special tokens, among them those that end a reply, are not drawn by chance."""


def warm(seed: int) -> Sampling:
    return Sampling(temperature=1, seed=seed, logit_bias=QUIET)


# -- text


def test_pieces_add_up_to_the_text(qwen: Any) -> None:
    with qwen.pausing(after=20):
        running = qwen.start(max_tokens=40, logprobs=True)
        begun = running.get(300)
    answer = qwen.read(running, begun=begun)
    view, lease = qwen.service.models.use(qwen.model, ModelOptions())
    with lease:
        assert answer.only.content == view.model.tokenizer.decode(answer.only.tokens)
    assert answer.only.reason == "length"
    assert answer.usage.completion_tokens == len(answer.only.tokens) == 40
    assert answer.deltas > 1, "it comes in pieces"


def test_a_late_reader_gets_the_same_text(qwen: Any) -> None:
    prompt = qwen.ask(max_tokens=40)
    late = qwen.start(max_tokens=40)
    wait_until(lambda: late.events.ended)
    assert qwen.read(late).only.content == prompt.only.content


def test_a_stop_token_ends_the_text(qwen: Any) -> None:
    tokens = qwen.ask(max_tokens=20, logprobs=True).only.tokens
    stop = tokens[7]
    cut = qwen.ask(max_tokens=20, logprobs=True, stop_token_ids=[stop]).only
    assert cut.tokens == tokens[: tokens.index(stop)]
    assert cut.reason == "stop"


def test_choices_are_equal_when_greedy_and_reproducible_with_a_seed(qwen: Any) -> None:
    greedy = qwen.ask(n=3, max_tokens=12)
    assert len({choice.content for choice in greedy.choices}) == 1
    assert greedy.usage.completion_tokens == 36
    drawn = qwen.ask(n=3, max_tokens=12, sampling=warm(1))
    assert len({choice.content for choice in drawn.choices}) == 3
    assert qwen.ask(n=3, max_tokens=12, sampling=warm(1)).choices == drawn.choices


def test_a_seed_gives_the_same_text_in_any_batch(qwen: Any) -> None:
    alone = qwen.ask(max_tokens=30, sampling=warm(42)).only.content
    others = [qwen.start(f"Other {i}", max_tokens=40, sampling=warm(i)) for i in range(6)]
    assert qwen.ask(max_tokens=30, sampling=warm(42)).only.content == alone
    assert qwen.ask(max_tokens=30, sampling=warm(43)).only.content != alone
    for generation in others:
        qwen.read(generation)
    unseeded = [qwen.ask(max_tokens=30, sampling=Sampling(temperature=1)) for _ in range(2)]
    assert unseeded[0].only.content != unseeded[1].only.content


def test_a_second_turn_reuses_the_first(qwen: Any) -> None:
    messages = [{"role": "user", "content": "Tell me about the old tower, please. " * 4}]
    first = qwen.ask(messages=messages, max_tokens=10, sampling=warm(1))
    messages += [
        {"role": "assistant", "content": first.only.content},
        {"role": "user", "content": "And the bridge?"},
    ]
    second = qwen.ask(messages=messages, max_tokens=4)
    assert second.usage.cached_tokens >= first.prompt_tokens - 4
    assert second.usage.prompt_tokens == second.prompt_tokens
    other = qwen.ask(messages=messages, max_tokens=4, salt="another tenant")
    assert other.usage.cached_tokens == 0
    assert other.only.content == second.only.content


def test_a_raw_prompt_of_text_equals_that_of_its_tokens(qwen: Any) -> None:
    text = qwen.ask(prompt="The quick brown", max_tokens=8).only.content
    view, lease = qwen.service.models.use(qwen.model, ModelOptions())
    with lease:
        ids = view.model.tokenizer.encode("The quick brown", special=True)
    assert qwen.ask(prompt=ids, max_tokens=8).only.content == text


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"prompt": "word " * 40_000}, ContextTooLong, ["maximum", "32767"]),
        ({"prompt": [5, 99_999]}, BadRequest, ["99999", "383"]),
        ({"prompt": ""}, BadRequest, ["empty"]),
        ({"stop": [""]}, BadRequest, ["stop"]),
        ({"n": 128}, BadRequest, ["128", "64"]),
        ({"min_tokens": 9, "max_tokens": 3}, BadRequest, ["min_tokens"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, BadRequest, ["messages[0].role"]),
        ({"messages": []}, BadRequest, ["messages"]),
        ({"options": ModelOptions(tool_parser="morse")}, BadRequest, ["morse", "hermes"]),
    ],
)
def test_a_parameter_that_cannot_be_served_is_refused_by_name(
    qwen: Any, given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as refused:
        qwen.start(**given)
    for word in words:
        assert word in refused.value.message


# -- endings


def test_closing_a_generation_frees_its_row(qwen: Any) -> None:
    generation = qwen.start(max_tokens=30_000, sampling=warm(1))
    generation.get(300)
    assert qwen.client.health().running == 1
    generation.close()
    wait_until(lambda: qwen.client.health().running == 0)
    assert qwen.read(generation).usage is not None, "its reader is told of the end"
    assert qwen.service.in_flight.active() == []


def test_closing_at_once_ends_every_generation(qwen: Any) -> None:
    """Also one that has not reached the engine thread, with an otherwise idle engine."""
    started = [qwen.start(max_tokens=30_000, sampling=warm(i)) for i in range(3)]
    for generation in started:
        generation.close()
        generation.close()
    assert all(qwen.read(generation).usage is not None for generation in started)
    assert qwen.client.health().running == 0


def test_dropping_a_generation_frees_its_row(qwen: Any) -> None:
    generation = qwen.start(max_tokens=30_000, sampling=warm(1))
    generation.get(300)
    del generation
    wait_until(lambda: qwen.client.health().running == 0)


def test_a_request_cancelled_during_preparation_is_not_admitted(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = qwen.service.models
    find = models.use

    def meanwhile(*args: Any, **more: Any) -> Any:
        qwen.service.cancel("gone")
        return find(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(models, "use", meanwhile)
        with pytest.raises(RequestFailed, match="its own client"):
            qwen.start(id="gone", max_tokens=30_000, sampling=warm(1))
    left = EventQueue()
    left.put([Failed(error=ErrorBody.of(RequestFailed("nobody reads")))])
    request = GenerateRequest(id="gone", model=qwen.model, prompt="x")
    with pytest.raises(RequestFailed, match="its own client"):
        qwen.service.submit(request, left)
    assert qwen.client.health().queued == qwen.client.health().running == 0
    assert qwen.ask(id="gone").usage is not None


class Killed(BaseException):
    """An exception that the engine does not expect."""


def kill_engine_thread(model: Any, *held: Generation) -> None:
    """Let the engine thread die while it decodes `held`, and wait for its end: pytest reports the
    exception of a thread in whichever test runs then."""
    (served,) = model.service.models.views()
    threads = []

    def die() -> None:
        threads.append(threading.current_thread())
        raise Killed

    served.engine.step = die
    for generation in held:
        answer = model.read(generation)
        assert (answer.error.code, answer.error.status) == ("engine_died", 503)
    threads[0].join(300)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_engine_thread_ends_all_requests(own_model: Any, qwen: Any) -> None:
    """The process ends after it, and the next request starts another."""
    model = own_model(qwen.model)
    held = [model.start(max_tokens=30_000, sampling=warm(i)) for i in range(3)]
    for generation in held:
        generation.get(300)

    kill_engine_thread(model, *held)
    assert not model.service.alive
    assert not model.client.health().ok
    for name in (model.model, "demo"):
        with pytest.raises(EngineUnavailable) as refused:
            model.start(model=name)
        assert refused.value.code == "engine_died"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_gets_the_error_if_the_engine_thread_dies_during_its_preparation(
    own_model: Any, qwen: Any
) -> None:
    model = own_model(qwen.model)
    held = model.start(max_tokens=30_000, sampling=warm(1))
    held.get(300)
    use = model.service.models.use

    def used(*given: Any, **more: Any) -> Any:
        found = use(*given, **more)
        kill_engine_thread(model, held)
        return found

    model.service.models.use = used
    with pytest.raises(EngineUnavailable) as refused:
        model.start()
    assert refused.value.code == "engine_died"


def test_a_request_whose_reader_is_given_up_ends(qwen: Any) -> None:
    generation = qwen.start(max_tokens=30_000, sampling=warm(3), logprobs=True, top_logprobs=20)
    wait_until(lambda: generation.events.unread > 100_000)
    generation.events.give_up()
    wait_until(lambda: qwen.client.health().running == 0)
    answer = qwen.read(generation)
    assert "unread" in answer.error.message
    assert qwen.ask(max_tokens=3).usage is not None


def test_closing_the_service_ends_running_requests(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model)
    generation = model.start(max_tokens=30_000, sampling=warm(1))
    model.client.close()
    answer = model.read(generation)
    assert answer.error.code == "engine_died"
    with pytest.raises(MLXProviderError):
        model.start()
    assert model.client.health().ok is False


# -- the operator's log has refusals, too


def test_a_refusal_is_in_the_log(qwen: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ContextTooLong):
        qwen.start("word " * 40_000)
    (line,) = [each.message for each in caplog.records if "refused" in each.message]
    assert "400 context_length_exceeded" in line
    assert "prompt is too long" in line


def test_a_third_party_error_names_the_line_of_its_code(
    qwen: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(BaseException):
        """An exception of an unexpected class."""

    def prepare(*args: Any, **more: Any) -> None:
        raise Odd("no such key")

    served = qwen.served()
    monkeypatch.setattr(type(served.model), "prepare", prepare)
    with pytest.raises(RequestFailed, match=r"Odd: no such key \(.*test_service_basics, line \d+"):
        qwen.start()
    assert "Traceback" in caplog.text


def test_an_id_belongs_to_one_request(qwen: Any) -> None:
    with qwen.pausing():
        first = qwen.start(id="same", max_tokens=60)
        with pytest.raises(BadRequest, match="another request with this id"):
            qwen.start(id="same", max_tokens=1)
    assert qwen.read(first).usage.completion_tokens == 60
    with pytest.raises(BadRequest, match="either messages or a prompt"):
        qwen.start(id="same", prompt="x", messages=[{"role": "user", "content": "x"}])
    assert qwen.ask(id="same", max_tokens=1).usage.completion_tokens == 1


# -- limits


def test_a_full_queue_refuses_requests_with_their_number(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model, max_rows=1, queue_per_row=2)
    running = model.start(max_tokens=30_000, sampling=warm(1))
    running.get(300)
    waiting = [model.start(max_tokens=2) for _ in range(2)]
    with pytest.raises(Overloaded) as refused:
        model.start(max_tokens=2)
    assert refused.value.status == 429
    assert "2 requests are waiting" in refused.value.message
    running.close()
    assert [model.read(each).only.reason for each in waiting] == ["length", "length"]
    assert model.ask(max_tokens=2).only.reason == "length"


def test_a_prompt_larger_than_memory_is_refused_with_the_setting(own_model: Any, qwen: Any) -> None:
    weights = (Path(qwen.model) / "model.safetensors").stat().st_size
    model = own_model(qwen.model, memory_limit=weights + 2_000_000)
    assert model.ask(max_tokens=2).only.reason == "length"
    with pytest.raises(BadRequest) as refused:
        model.start("word " * 3000, max_tokens=2)
    assert "bytes of cache" in refused.value.message
    assert "MLX_PROVIDER_MEMORY_LIMIT" in refused.value.message
    assert model.ask(max_tokens=2).only.reason == "length"


def test_a_model_larger_than_memory_is_refused_with_the_limit(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model, memory_limit=1000)
    with pytest.raises(EngineUnavailable, match="1000"):
        model.start()


# -- models


def test_two_models_serve_requests_at_the_same_time(qwen: Any, tiny: Any) -> None:
    other = tiny("llama")
    alone = [model.ask(max_tokens=20).only.content for model in (qwen, other)]
    assert alone[0] != alone[1]
    started = [(m, m.start(max_tokens=20)) for m in (qwen, other, qwen, other)]
    assert [m.read(each).only.content for m, each in started] == alone * 2
    named = {status.model for status in qwen.client.health().models}
    assert {qwen.model, other.model} <= named


def test_the_least_recently_used_model_is_unloaded(own_model: Any, build_tiny: Any) -> None:
    folders = [build_tiny("qwen3", seed=i) for i in range(3)]
    size = (folders[0] / "model.safetensors").stat().st_size
    first = own_model(folders[0], memory_limit=int(2.9 * size))
    second, third = map(first.beside, folders[1:])
    texts = [first.ask(max_tokens=6).only.content, second.ask(max_tokens=6).only.content]
    assert first.ask(max_tokens=6).only.content == texts[0]
    third.ask(max_tokens=6)
    loaded = {status.model for status in first.client.health().models}
    assert loaded == {first.model, third.model}, "the second was the longest unused"
    assert second.ask(max_tokens=6).only.content == texts[1]
    assert second.model in {status.model for status in first.client.health().models}


def test_a_model_in_use_is_not_unloaded(own_model: Any, build_tiny: Any) -> None:
    folders = [build_tiny("qwen3", seed=i, intermediate_size=1024) for i in range(2)]
    size = (folders[0] / "model.safetensors").stat().st_size
    first = own_model(folders[0], memory_limit=int(1.9 * size), model_wait=0.2)
    second = first.beside(folders[1])
    running = first.start(max_tokens=30_000, sampling=warm(1))
    running.get(300)
    with pytest.raises(MemoryInUse, match="in use") as refused:
        second.start()
    assert refused.value.retry_after
    running.close()
    wait_until(lambda: first.client.health().running == 0)
    assert second.ask(max_tokens=2).only.reason == "length"


def test_the_error_for_an_unknown_model_lists_the_models(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models--somebody--has-this").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/has-this", str(tmp_path / "nothing")):
        with pytest.raises(ModelNotFound) as refused:
            qwen.beside(name).start()
        assert refused.value.status == 404
        assert "somebody/has-this" in refused.value.message


def broken(folder: Path, what: str) -> None:
    config = folder / "config.json"
    if what == "config":
        config.write_text('{"model_type": ')
    elif what == "weights":
        (folder / "model.safetensors").unlink()
    elif what == "cut weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif what == "size":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 32}))
    elif what == "type":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "abacus"}))
    elif what == "empty":
        config.unlink()


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("config", BadRequest, ["config.json"]),
        ("weights", BadRequest, ["not a complete MLX model"]),
        ("cut weights", MLXProviderError, ["could not be loaded"]),
        ("tokenizer", MLXProviderError, []),
        ("no tokenizer", MLXProviderError, []),
        ("size", MLXProviderError, []),
        ("type", UnsupportedModel, ["abacus", "mlx_model_families"]),
        ("empty", BadRequest, ["config.json"]),
    ],
)
def test_a_broken_folder_is_an_error_with_a_name(
    qwen: Any, build_tiny: Any, what: str, error: type[MLXProviderError], words: list[str]
) -> None:
    folder = build_tiny("qwen3")
    broken(folder, what)
    with pytest.raises(error) as refused:
        qwen.beside(folder).start()
    message = refused.value.message
    for word in [*words, folder.name]:
        assert word in message
    assert "Traceback" not in message
    assert 'File "' not in message
    assert refused.value.status in (400, 503)
    assert qwen.ask(max_tokens=2).only.reason == "length", "the others go on"


# -- tenants


def test_metrics_count_ended_requests_and_decoded_tokens(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model)
    model.ask(max_tokens=7)
    with pytest.raises(BadRequest):
        model.start(stop=[""])
    text = model.client.metrics().decode()
    counted = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#") and "_created" not in line
    }
    ended = {name: value for name, value in counted.items() if "length" in name}
    assert list(ended.values()) == [1.0]
    decoded = {n: v for n, v in counted.items() if "token" in n and v == 7}
    assert decoded, text


def test_the_prefix_cache_is_reported_and_cleared(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model)
    assert model.client.cache_report() == {}
    text = "The same long beginning of a question. " * 4
    assert model.ask(text, max_tokens=2).usage.cached_tokens == 0
    assert model.ask(text, max_tokens=2).usage.cached_tokens > 0
    assert any(model.client.cache_report().values())
    model.client.cache_clear()
    assert model.ask(text, max_tokens=2).usage.cached_tokens == 0


@pytest.mark.parametrize("retain", [True, False])
def test_the_cache_reuses_a_session_that_returns(qwen: Any, retain: bool) -> None:
    qwen.ask(
        "It comes back, however late. " * 4, session=f"s {retain}", retain=retain, max_tokens=2
    )
    (pin,) = [
        pin
        for (_, name), pin in qwen.service.models.prefixes.cache().sessions.items()
        if name == f"s {retain}"
    ]
    assert pin.awaited is retain
