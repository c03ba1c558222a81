"""What a result says about the machine where no device computes."""

from __future__ import annotations

import os

from mlx_provider.cores import cores
from mlx_provider_bench.report import Result


def without_device(name: str = "none") -> Result:
    """As `report.surroundings`; `name`: the device that is only imagined."""
    load = round(os.getloadavg()[0], 2)
    return {"device": name, "blas": "none", "dtype": "none", "cores": cores(), "load_average": load}
