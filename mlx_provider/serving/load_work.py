"""Unloads and loads in a separate thread, so that a cancelled request delays no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Generic, TypeVar

from ..errors import EngineDied, LoadFailed, MLXProviderError, for_another
from .load_line import Line, LoadPlan, too_large
from .memory_ledger import HoldsMemory
from .residents import Leaving, Resident, Residents

log = logging.getLogger(__name__)

T = TypeVar("T", bound=HoldsMemory)


class LoadWork(Generic[T]):
    """One task at a time: models leave, then one loads."""

    def __init__(
        self,
        residents: Residents[T],
        line: Line[T],
        changed: threading.Condition,
        advance: Callable[[], None],
        unload: Callable[[T], None],
    ) -> None:
        """`changed` guards residents and queue. `advance` (under it) serves the queue again."""
        self._residents = residents
        self._line = line
        self._changed = changed
        self._advance = advance
        self._unload = unload
        self.key: Hashable | None = None
        self.generation = 0
        """Generation of the engine thread. A model that loaded on an earlier one is gone."""

    def start(self, leaving: Leaving[T], key: Hashable, plan: LoadPlan[T] | None) -> None:
        """`plan`: `None` if the model is in memory and its rows need more."""
        self.key = key
        arguments = (leaving, key, plan)
        threading.Thread(target=self._run, args=arguments, name="mlx-load", daemon=True).start()

    def leave(self, leaving: Leaving[T]) -> None:
        """Blocks; without the lock."""
        while leaving:
            resident, model = leaving.pop()
            try:
                self._unload(model)
            except EngineDied:
                log.warning("a model was lost with its engine thread")
            finally:
                self.left(resident)

    def left(self, resident: Resident[T]) -> None:
        with self._changed:
            self._residents.remove(resident)
            self._advance()

    def _run(self, leaving: Leaving[T], key: Hashable, plan: LoadPlan[T] | None) -> None:
        generation = self.generation
        try:
            self.leave(leaving)
            if plan is not None:
                self.leave(self._load(key, plan, generation))
        finally:
            with self._changed:
                self.key = None
                self._advance()
                self._changed.notify_all()

    def _load(self, key: Hashable, plan: LoadPlan[T], generation: int) -> Leaving[T]:
        """Returns models that must leave because this one took more than expected."""
        model: T | None = None
        error: MLXProviderError = LoadFailed(f"{plan.name} could not be loaded")
        try:
            model = plan.load()
        except MLXProviderError as failure:
            error = for_another(failure)
        finally:
            with self._changed:
                leaving = self._settle(key, plan, model, error, generation)
        return leaving

    def _settle(
        self,
        key: Hashable,
        plan: LoadPlan[T],
        model: T | None,
        error: MLXProviderError,
        generation: int,
    ) -> Leaving[T]:
        ledger, resident = self._residents.ledger, self._residents.of(key)
        if model is None:
            self._residents.remove(resident)
            self._refuse(key, error)
            return []
        ledger.correct(key, model)
        if generation != self.generation:
            self._refuse(key, EngineDied("the engine thread died while the model loaded"))
            return [(resident, model)]
        if model.nbytes > ledger.limit:
            self._refuse(key, too_large(plan.name, model.nbytes, ledger.limit))
            return [(resident, model)]
        for ticket in self._line:
            if ticket.key == key:
                ticket.plan = replace(ticket.plan, nbytes=model.nbytes)
        others = self._residents.idle(self._residents.rows() - ledger.free, key)
        if others is None:  # it loads again when there is enough memory
            return [(resident, model)]
        leaving = self._residents.detach(others)
        self._residents.arrived(resident, model)
        self._advance()  # before it counts as idle
        return leaving

    def _refuse(self, key: Hashable, error: MLXProviderError) -> None:
        self._line.refuse((each for each in self._line if each.key == key), error)
        self._changed.notify_all()
