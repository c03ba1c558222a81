"""What was computed before."""

from __future__ import annotations

from command_line import running


def budgets() -> None:
    """Tokens that agents with prompts of 60k compute on prefix budgets of 20k, 40k and 80k."""
    running.preload()
    from dataclasses import asdict

    from small_budgets import run

    running.show({"turns": [asdict(each) for each in run()]})


def stays() -> None:
    """Hit rates of agents whose tools run, with memory for a third of their prefixes."""
    running.preload()
    from returning_agents import run

    running.show({"rates": run()})


def restart() -> None:
    """Tokens that an agent with 60k computes after a restart."""
    running.preload()
    from dataclasses import asdict

    from restart import run

    running.show({"restarts": [asdict(each) for each in run()]})


def turns() -> None:
    """Bytes that a conversation of ten turns copies, and its memory, in place and as before."""
    running.preload()
    from dataclasses import asdict

    from turns import measured

    for in_place in (False, True):
        turns = [asdict(each) for each in measured(in_place=in_place)]
        running.show({"in_place": in_place, "turns": turns})
