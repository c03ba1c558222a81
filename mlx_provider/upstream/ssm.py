"""mlx-lm's state space rule with a smaller step, so that chunks of a prompt give equal results.

Upstream (mlx_lm/models/ssm.py 0.32.2, `ssm_attn`) computes the tokens of a call in steps of 256,
and a pass that ends within a step rounds differently. The scheduler's chunk grid is a multiple of
the step size here (tests/families/test_prefill_grid.py: difference 0 instead of 0.03 in bfloat16
and 0.05 in 4 bits).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..records import Function
from .patching import patch

STEP = 32


def one_step_size() -> None:
    """Replace the function in upstream's module, if a model has imported it. Idempotent."""
    module = sys.modules.get("mlx_lm.models.ssm")
    if module is not None:
        patch([module], "ssm_attn", _stepped)


def _stepped(original: Function) -> Function:
    @functools.wraps(original)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"step": STEP})

    return stepped
