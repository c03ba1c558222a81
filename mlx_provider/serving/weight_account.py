"""What weights take of the memory limit, from before they are loaded until they are gone."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class WeightAccount:
    """Bytes by model. Has no lock of its own: whoever keeps the models keeps it, too."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._bytes: dict[Hashable, int] = {}

    def reserve(self, key: Hashable, nbytes: int) -> None:
        """Set aside what a model is expected to take. Raises `ValueError` if it has its bytes."""
        if key in self._bytes:
            raise ValueError(f"{key} has its bytes already")
        self._bytes[key] = nbytes

    def correct(self, key: Hashable, nbytes: int) -> None:
        """What a reserved model takes in truth."""
        if key not in self._bytes:
            raise ValueError(f"{key} has reserved nothing")
        self._bytes[key] = nbytes

    def release(self, key: Hashable) -> None:
        """A model is gone, or was never loaded. Idempotent."""
        self._bytes.pop(key, None)

    def of(self, key: Hashable) -> int:
        """Bytes of one model; 0 where it is not here."""
        return self._bytes.get(key, 0)

    @property
    def limit(self) -> int:
        """Bytes for weights and everything else."""
        return self._limit()

    @property
    def total(self) -> int:
        """Bytes of every model, loaded or about to be."""
        return sum(self._bytes.values())

    @property
    def free(self) -> int:
        """Bytes that weights leave; below zero where a model took more than was expected."""
        return self.limit - self.total
