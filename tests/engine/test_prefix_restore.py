"""A prefix is restored from disk while other requests decode."""

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from from_disk import flush
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache import disk as disk_tier
from mlx_provider.engine.prefix_cache.buffers import Claim
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.disk import DiskTier
from mlx_provider.engine.request import Phase, Request
from mlx_provider.engine.worker import EngineWorker
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import Alternating, alone, new_engine, new_request, output_of, run
from schedules import Calls

PROMPT = [30 + i * 7 % 300 for i in range(200)]
PIECES = 5
"""Files of the prompt."""


@dataclass
class Restarted:
    """An engine that finds the prefixes of an earlier engine on disk."""

    model: TextModel
    folder: Path
    calls: Calls
    cache: PrefixCache
    engine: Engine

    def restart(self) -> None:
        self.cache.close()
        disk = DiskTier(self.folder, 2**30, self.calls)
        self.cache = PrefixCache(budget=lambda: 2**24, disk=disk)
        self.engine = new_engine(
            self.model, prefix_cache=self.cache, clock=lambda: self.now, scheduler=Alternating
        )

    now = 0.0

    def ask(self, tokens: list[int], **more: object) -> Request:
        request = new_request(tokens, max_tokens=4, **more)
        self.engine.submit(request)
        return request

    def served(self, tokens: list[int]) -> Request:
        """A request, once it has ended."""
        request = self.ask(tokens)
        while self.engine.scheduler.waiting or not self.engine.idle:
            self.engine.step()
            if any(job.restoring for job in self.engine.scheduler.waiting):
                self.calls.run()
        assert output_of(request).tokens == output_of(alone(self.model, request)).tokens
        return request

    def names(self) -> list[Path]:
        return sorted((self.folder / "prefixes").glob("*.kv.safetensors"))


@pytest.fixture
def restarted(
    qwen3: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Restarted]:
    monkeypatch.setattr(disk_tier, "EDGE", len(PROMPT) // PIECES)
    disk = DiskTier(tmp_path, 2**30, Calls())
    cache = PrefixCache(budget=lambda: 2**24, disk=disk)
    made = Restarted(qwen3, tmp_path, Calls(), cache, new_engine(qwen3, prefix_cache=cache))
    made.served(PROMPT)
    made.restart()
    yield made
    made.cache.close()


def test_other_requests_decode_between_two_files_of_a_restore(restarted: Restarted) -> None:
    engine = restarted.engine
    neighbour = new_request([40, 41, 42], max_tokens=200)
    engine.submit(neighbour)
    engine.step()
    asked = restarted.ask([*PROMPT, 50, 51])
    brief = restarted.ask([60, 61])
    calls = 0
    engine.step()
    while jobs := [job for job in engine.scheduler.waiting if job.request is asked]:
        (job,) = jobs
        had = len(neighbour.rows[0].tokens)
        if job.restoring:
            assert asked.phase is Phase.PREFILL
            restarted.calls.run()
            calls += 1
            overtaken = brief.phase is Phase.DONE
        engine.step()
        assert len(neighbour.rows[0].tokens) == had + 1, "no step waits for the disk"
    assert calls >= PIECES
    assert overtaken
    run(engine)
    assert (asked.cached_tokens, asked.prefilled_tokens) == (len(PROMPT), 2)
    for request in (neighbour, asked, brief):
        assert output_of(request).tokens == output_of(alone(restarted.model, request)).tokens


def test_prefixes_in_memory_are_not_read_from_disk(restarted: Restarted) -> None:
    restarted.served(PROMPT[:100])
    (at,) = [path for path in restarted.names() if path.stat().st_ino == _first(restarted)]
    at.write_bytes(b"not ours")
    assert restarted.served([*PROMPT, 50]).cached_tokens == len(PROMPT)


def _first(restarted: Restarted) -> int:
    headers = restarted.cache.disk.index.files.values()  # type: ignore[union-attr]
    names = [h.name for h in headers if h.start == 0]
    return (restarted.folder / "prefixes" / names[0]).stat().st_ino


def layers_alive(model: TextModel) -> int:
    """Layers of all row caches."""
    kinds = tuple({type(layer) for layer in model.make_cache()})
    gc.collect()
    return sum(isinstance(each, kinds) for each in gc.get_objects())


@pytest.mark.parametrize("reads", range(0, PIECES + 1, 2))
def test_a_cancelled_restore_frees_its_row(restarted: Restarted, reads: int) -> None:
    asked = restarted.ask([*PROMPT, 50])
    before = layers_alive(restarted.model)
    restarted.engine.step()
    for _ in range(reads):
        restarted.calls.run()
    assert (layers_alive(restarted.model) > before) == (reads > 0)
    restarted.engine.cancel(asked)
    assert layers_alive(restarted.model) == before
    run(restarted.engine)
    assert restarted.served([*PROMPT, 51]).cached_tokens == len(PROMPT)


def test_a_fault_after_a_restore_frees_its_row(
    restarted: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = restarted.ask([*PROMPT, *PROMPT, *PROMPT])
    before = layers_alive(restarted.model)
    restarted.engine.step()
    (job,) = restarted.engine.scheduler.waiting
    while job.restoring:
        restarted.calls.run()
    monkeypatch.setattr(restarted.cache, "is_valid", lambda match: 1 / 0)
    restarted.engine.step()
    assert layers_alive(restarted.model) == before + len(job.row_cache())
    run(restarted.engine)
    assert output_of(asked).tokens == output_of(alone(restarted.model, asked)).tokens


def test_a_prompt_that_begins_a_restore_releases_its_lease(
    restarted: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = restarted.engine.prefix_cache
    monkeypatch.setattr(policy, "offers", lambda job: [Claim(nbytes=1)])
    restarted.ask([*PROMPT, 50])
    restarted.engine.step()
    (job,) = restarted.engine.scheduler.waiting
    assert job.restoring
    assert job.rows[0].lease is None
    restarted.engine.cancel(job.request)


def test_a_deadline_ends_a_restore(restarted: Restarted) -> None:
    asked = restarted.ask([*PROMPT, 50], deadline=5.0)
    restarted.engine.step()
    restarted.calls.run()
    restarted.engine.step()
    assert asked.phase is Phase.PREFILL
    assert 0 < restarted.engine.rest < 1, "it looks at the clock while the disk is slow"
    restarted.now = 6.0
    restarted.engine.step()
    assert asked.phase is Phase.DONE
    assert restarted.served([*PROMPT, 51]).cached_tokens == len(PROMPT)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, None])
def test_the_restore_ends_at_a_damaged_file(restarted: Restarted, damage: bytes | None) -> None:
    headers = restarted.cache.disk.index.files.values()  # type: ignore[union-attr]
    (third,) = [h for h in headers if h.start == 80]
    path = restarted.folder / "prefixes" / third.name
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8 if damage is None else damage)
    assert restarted.served([*PROMPT, 50]).cached_tokens == 80
    assert restarted.served([*PROMPT, 51]).cached_tokens == len(PROMPT), "it was computed and kept"


def test_a_prompt_is_written_while_it_is_computed(restarted: Restarted) -> None:
    before = set(restarted.names())
    restarted.ask(PROMPT[::-1])
    for _ in range(9):
        restarted.engine.step()
    (job,) = restarted.engine.scheduler.waiting
    assert 80 < job.computed_tokens < len(PROMPT)
    flush(restarted.cache.disk)
    assert len(set(restarted.names()) - before) == job.computed_tokens // 40
    run(restarted.engine)


def test_tokens_that_the_full_queue_refuses_are_written_with_a_later_turn(
    restarted: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, prompt = restarted.cache.disk, PROMPT[::-1]
    assert disk is not None
    monkeypatch.setattr(disk_tier, "MAX_QUEUED", 1)
    disk.writer.do((slow := threading.Event()).wait)
    restarted.served(prompt)
    slow.set()
    monkeypatch.undo()
    monkeypatch.setattr(disk_tier, "EDGE", 40)
    restarted.served([*prompt, 50, 51])
    restarted.restart()
    assert restarted.served([*prompt, 50, 51, 52]).cached_tokens == len(prompt) + 2


def test_the_engine_thread_waits_for_the_disk_without_polling(
    restarted: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = EngineWorker(_deliver, lambda error: None)
    steps = 0
    cache = PrefixCache(budget=lambda: 2**24, disk=DiskTier(restarted.folder, 2**30, worker.call))
    engine = worker.call(lambda: new_engine(restarted.model, prefix_cache=cache)).result()
    take = engine.step

    def counted() -> object:
        nonlocal steps
        steps += 1
        return take()

    monkeypatch.setattr(engine, "step", counted)
    asked = new_request([*PROMPT, 50], max_tokens=2)
    worker.call(lambda: (worker.add(engine), engine.submit(asked))).result()
    events = []
    while asked.phase is not Phase.DONE or not events:
        events += asked.events.get(300) or []
    worker.close()
    cache.close()
    assert asked.cached_tokens == len(PROMPT)
    assert steps < 3 * (PIECES + 3)


def _deliver(posts: list[object]) -> None:
    for request, events in posts:  # type: ignore[misc]
        request.events.put(events)
