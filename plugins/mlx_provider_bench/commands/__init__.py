"""The commands of `bench`: measurements that anyone can repeat; the last line is JSON."""

from __future__ import annotations

import typer

from .ours import prefix, speed

MODEL = "MODEL"
"""Stands for a model's name in the list of commands."""

bench = typer.Typer()
bench.command(MODEL)(speed)
bench.command()(prefix)
