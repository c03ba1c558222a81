"""What ranks tell one another of themselves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from mlx_provider.errors import EngineUnavailable, ProcessLost
from mlx_provider.replicas import ProcessStatus

__all__ = ["Hello", "ProcessStatus", "RankFault", "RanksDiffer", "differences", "rank_name"]


class RanksDiffer(EngineUnavailable):
    """Ranks have different versions, plugins or weights: the group does not start."""


class _Message(BaseModel):
    # another version, which is refused by name, may say more
    model_config = ConfigDict(extra="ignore", frozen=True)


class Hello(_Message):
    """A rank as it is when the group starts."""

    rank: int = Field(ge=0)
    host: str = Field(max_length=256)
    pid: int
    python: str
    """Its version."""
    versions: dict[str, str]
    """Of the distributions that compute, by name; empty where one is not installed."""
    plugins: dict[str, str]
    """Version of every plugin in use by its key, and the digest of a third party's sources."""
    device: str
    """Name of the device."""
    memory_limit: int
    """Bytes."""


class RankFault(_Message):
    """Why a rank is lost. `since`: Unix seconds."""

    rank: int
    host: str
    reason: str
    since: float

    def error(self) -> ProcessLost:
        """What requests in flight are told."""
        return ProcessLost(f"rank {self.rank} on {self.host} is lost: {self.reason}")


def rank_name(rank: int) -> str:
    """As `/health`, `doctor` and `engine status` show it."""
    return f"rank {rank}"


def differences(mine: Hello, other: Hello) -> list[str]:
    """What may not differ between two ranks and does: one entry each, both sides named."""
    found = _entries("", {"python": mine.python}, {"python": other.python}, mine, other)
    found += _entries("", mine.versions, other.versions, mine, other)
    return found + _entries("plugin ", mine.plugins, other.plugins, mine, other)


def _entries(
    kind: str, mine: dict[str, str], theirs: dict[str, str], one: Hello, other: Hello
) -> list[str]:
    odd = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    return [
        f"{kind}{name}: {theirs.get(name) or 'not installed'} on rank {other.rank} "
        f"({other.host}), {mine.get(name) or 'not installed'} on rank {one.rank} ({one.host})"
        for name in odd
    ]
