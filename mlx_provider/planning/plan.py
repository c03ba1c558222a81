"""The whole answer: a model on all machines, on the largest of them alone, and what pays."""

from __future__ import annotations

from dataclasses import dataclass

from .bound import prompt_seconds, step_seconds
from .group import Group, group
from .links import Link
from .machines import Machine
from .subject import Subject

USUAL_CONTEXT = 32_768
"""Tokens of a request where none are asked for: an agent's."""
FASTER = 1.1
"""Times as fast as one machine, from which on a group is called faster."""


@dataclass(frozen=True)
class Load:
    """What is asked of the machines."""

    context: int
    """Tokens of each request, answer included."""
    rows: int
    """Requests at once."""


@dataclass(frozen=True)
class Outlook:
    """A group under a load, at best."""

    group: Group
    fits: bool
    longest: int
    """Tokens that each request may have; 0: no request fits, or not even the weights."""
    reading: float
    """Seconds of a decode step."""
    exchanging: float
    prompt_computing: float
    """Seconds of a prompt as long as the context."""
    prompt_exchanging: float
    rows: int

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.rows / (self.reading + self.exchanging)

    @property
    def prompt_seconds(self) -> float:
        return self.prompt_computing + self.prompt_exchanging


@dataclass(frozen=True)
class Plan:
    """A model on machines that may not be bought yet. All of it is an estimate."""

    subject: Subject
    link: Link
    load: Load
    all: Outlook
    alone: Outlook
    """On the one machine with the most memory."""

    @property
    def verdict(self) -> str:
        """Whether the machines pay, in a sentence."""
        count = len(self.all.group.ranks)
        if count == 1:
            return "it fits on this machine" if self.all.fits else "it does not fit on this machine"
        if not self.all.fits:
            return f"it does not fit on {count} machines either" + self._shorter()
        if not self.alone.fits:
            fits = f"it does not fit on one of these machines, and fits on {count}"
            layers = ", whose layers work one after another: no faster than one that held it"
            return fits + layers * bool(self.all.group.split.layers)
        return self._compared(count)

    def _shorter(self) -> str:
        longest = self.all.longest
        return f"; with a context of {longest:,} tokens it does" if longest else ""

    def _compared(self, count: int) -> str:
        gain = self.all.tokens_per_second / self.alone.tokens_per_second
        prompt = self.alone.prompt_seconds / self.all.prompt_seconds
        speeds = f"at best decode {gain:.2f} and prompts {prompt:.2f} times as fast as one"
        if gain >= FASTER:
            return f"{count} machines may pay in speed: {speeds}"
        return (
            f"one machine decodes as fast or faster: {count} give {speeds}; "
            f"as engines of their own behind one gateway they serve {count} times the requests"
        )


def plan(subject: Subject, machines: list[Machine], link: Link, load: Load) -> Plan:
    """Raises `BadRequest` for machines over which the model cannot be split, `UnsupportedModel`."""
    largest = max(machines, key=lambda machine: (machine.room, machine.chip.bytes))
    return Plan(
        subject,
        link,
        load,
        _outlook(subject, machines, link, load),
        _outlook(subject, [largest], link, load),
    )


def usual_load(subject: Subject, context: int | None, rows: int) -> Load:
    """What is asked, or what an agent takes as far as the model's own context allows."""
    usual = min(USUAL_CONTEXT, subject.context or USUAL_CONTEXT)
    return Load(usual if context is None else context, rows)


def _outlook(subject: Subject, machines: list[Machine], link: Link, load: Load) -> Outlook:
    found = group(subject, machines)
    reading, exchanging = step_seconds(found, link, load.context, load.rows)
    computing, prompt_exchanging = prompt_seconds(found, link, subject.text, load.context)
    return Outlook(
        found,
        found.fits(load.context, load.rows),
        found.longest(subject.context, load.rows),
        reading,
        exchanging,
        computing,
        prompt_exchanging,
        load.rows,
    )
