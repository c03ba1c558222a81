"""Shares the device between accounts by tokens. Imports no mlx.

Each account has a count of the tokens that it was served, as in VTC (Sheng et al., OSDI 2024). An
account without requests is forgotten, and starts again at the smallest count. Prompts run in the
order of the counts at which they would end. So a short prompt precedes a long one, and however many
prompts another account has, at most as many tokens of them run before a prompt as that has itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..request import PrefillJob, Request, Row

OUTPUT_TOKEN = 2.0
"""A token of a reply counts as this many of a prompt, as in VTC."""


class FairShares:
    """The tokens that each account was served, divided by its share."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    @property
    def several(self) -> bool:
        """Whether more than one account may have requests."""
        return len(self._served) > 1

    def join(self, request: Request, present: Iterable[Request]) -> None:
        """A request comes. `present`: the other requests that have not ended."""
        served = {each.account: self._served.get(each.account, 0.0) for each in present}
        served.setdefault(request.account, min(served.values(), default=0.0))
        self._served = served

    def charge(self, request: Request, tokens: float) -> None:
        """Tokens of a request have run."""
        account = request.account
        self._served[account] = self._served.get(account, 0.0) + tokens / request.share

    def ordered(self, jobs: Sequence[PrefillJob]) -> Sequence[PrefillJob]:
        """Prompts in the order in which they run. Those of one account keep their order."""
        if not self.several:
            return jobs
        ends = dict(self._served)
        tags: dict[PrefillJob, float] = {}
        for job in jobs:
            account = job.request.account
            ends[account] = ends.get(account, 0.0) + job.work / job.request.share
            tags[job] = ends[account]
        return sorted(jobs, key=tags.__getitem__)


def above_share(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that give way to an account without rows, one after the other: the youngest of the
    account with the most rows. Each account keeps one."""
    left = sorted(rows, key=lambda row: (row.request.arrived, row.index))
    held = Counter(row.request.account for row in left)
    while held:
        account, count = held.most_common(1)[0]
        if count < 2:
            return
        at = max(at for at, row in enumerate(left) if row.request.account == account)
        held[account] -= 1
        yield left.pop(at)
