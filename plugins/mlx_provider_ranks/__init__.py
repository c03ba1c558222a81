"""One model over several machines: a group of ranks, of which rank 0 leads.

Rank 0 serves HTTP, schedules and decides. It sends each decision to the followers, which execute
the same. MLX's collectives send tensors, the `channel` sends decisions.

| module | content |
|---|---|
| `command`, `launching`, `supervisor`, `report` | a group from its start to its restart |
| `process`, `group`, `hello`, `messages`, `address` | one rank, and how ranks meet |
| `channel`, `door`, `framing`, `leader_link`, `follower_link`, `watch` | messages, lost ranks |
| `leader`, `follower` | the two kinds of ranks |
| `sides`, `replica`, `encoding`, `gathering` | decisions as messages, arrays by collectives |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_provider import hookimpl

if TYPE_CHECKING:
    import typer

mlx_provider_api = 1


@hookimpl
def mlx_register_commands(cli: typer.Typer) -> None:
    from .command import serve_ranks

    cli.command("serve-ranks")(serve_ranks)
