"""What a model would need of machines that nobody has bought yet, and how fast they could be."""

from __future__ import annotations

from .links import link
from .machines import machines
from .plan import Plan, plan, usual_load
from .report import as_json
from .subject import subject

__all__ = ["Plan", "as_json", "link", "machines", "plan", "subject", "usual_load"]
