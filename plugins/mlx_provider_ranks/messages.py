"""Messages of ranks about themselves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from mlx_provider.errors import EngineUnavailable, ProcessLost
from mlx_provider.replicas import ProcessStatus

__all__ = ["Hello", "ProcessStatus", "RankFault", "RanksDiffer", "differences", "rank_name"]


class RanksDiffer(EngineUnavailable):
    """Ranks have different versions, plugins or weights: the group does not start."""


class _Message(BaseModel):
    # another version can send more fields; it is refused with its name
    model_config = ConfigDict(extra="ignore", frozen=True)


class Hello(_Message):
    """The properties of a rank at the start of the group."""

    rank: int = Field(ge=0)
    host: str = Field(max_length=256)
    pid: int
    python: str
    """Its version."""
    versions: dict[str, str]
    """Versions of the distributions that compute, by name; empty: not installed."""
    plugins: dict[str, str]
    """Version of every plugin in use by its key, and the digest of third-party sources."""
    device: str
    """Name of the device."""
    memory_limit: int
    """Bytes."""


class RankFault(_Message):
    """Why a rank was lost. `since`: Unix seconds."""

    rank: int
    host: str
    reason: str
    since: float

    def error(self) -> ProcessLost:
        """The error for active requests."""
        return ProcessLost(f"rank {self.rank} on {self.host} is lost: {self.reason}")


def rank_name(rank: int) -> str:
    """The name of a rank in `/health`, `doctor` and `engine status`."""
    return f"rank {rank}"


def differences(mine: Hello, other: Hello) -> list[str]:
    """Forbidden differences between two ranks: one entry each, which names both."""
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
