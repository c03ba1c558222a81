"""Reports of a rank to its supervisor, as lines of JSON on standard output.

`mlx.launch` forwards output, also from other machines, but no exit code (mlx 0.32).
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mlx_provider.errors import MLXProviderError, ProcessLost

from .messages import RankFault

REPORT_PREFIX = b"mlx-provider-rank "


class Report(BaseModel):
    """`serving`: the group serves. `lost`: a rank was lost, and this one ends. `failed`:
    this rank ended, but a restart can help. `refused`: a restart would fail again."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["serving", "lost", "failed", "refused"]
    rank: int
    message: str = ""
    fault: RankFault | None = None

    def tell(self) -> None:
        """Write the report with one call, so that lines of several threads do not mix."""
        os.write(1, REPORT_PREFIX + self.model_dump_json().encode() + b"\n")

    @classmethod
    def of(cls, rank: int, error: MLXProviderError) -> Report:
        """The report for an error at the start of a rank."""
        lost = isinstance(error, ProcessLost)
        return cls(kind="failed" if lost else "refused", rank=rank, message=error.message)

    @classmethod
    def read(cls, line: bytes) -> Report | None:
        """`None`: the line is not a report."""
        if not line.startswith(REPORT_PREFIX):
            return None
        try:
            return cls.model_validate_json(line[len(REPORT_PREFIX) :])
        except ValidationError:
            return None
