"""Benchmarks that developers run: `python tests/benchmarks NAME`; without a name, their list."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out

from developer_commands import benchmarks

benchmarks()
