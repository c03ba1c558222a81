"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Hidden = Annotated[int, typer.Option(help="Hidden size of the random models.")]
Layers = Annotated[int, typer.Option(help="Layers of the random models.")]
Dtype = Annotated[str, typer.Option(help="Weights of the random models.")]
