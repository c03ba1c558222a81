"""The commands of `bench`: measurements that anyone can repeat; the last line is JSON."""

from __future__ import annotations

import typer

from .compare import compare, model, report
from .ours import engine, prefix, speed

MODEL = "MODEL"
"""Stands for a model's name in the list of commands."""

bench = typer.Typer()
bench.command(MODEL)(speed)
for command in (compare, report, model, engine, prefix):
    bench.command()(command)
