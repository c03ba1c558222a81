"""What a rank's process tells its supervisor: lines of JSON on its output.

`mlx.launch` passes output on, from other machines too, but no exit code (mlx 0.32).
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mlx_provider.errors import MLXProviderError, ProcessLost

from .messages import RankFault

REPORT_PREFIX = b"mlx-provider-rank "


class Report(BaseModel):
    """`serving`: the group answers requests. `lost`: a rank is, and this one leaves. `failed`:
    this one ended, and another time it may not. `refused`: it would again."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["serving", "lost", "failed", "refused"]
    rank: int
    message: str = ""
    fault: RankFault | None = None

    def tell(self) -> None:
        """In one write, so that lines of several threads stay whole."""
        os.write(1, REPORT_PREFIX + self.model_dump_json().encode() + b"\n")

    @classmethod
    def of(cls, rank: int, error: MLXProviderError) -> Report:
        """Of an error that ended a rank's start."""
        lost = isinstance(error, ProcessLost)
        return cls(kind="failed" if lost else "refused", rank=rank, message=error.message)

    @classmethod
    def read(cls, line: bytes) -> Report | None:
        """`None` for a line that is something else."""
        if not line.startswith(REPORT_PREFIX):
            return None
        try:
            return cls.model_validate_json(line[len(REPORT_PREFIX) :])
        except ValidationError:
            return None
