#!/usr/bin/env python
"""Count how many of the draft head's guesses the model itself would have said.

    python evaluate_drafts.py ../../mlx_provider/demo/hybrid

mlx_vlm's drafter guesses two tokens at a time on the held-out questions without pictures, greedily
and in float32, and the same answers are made without it.
"""

import argparse
from collections import Counter
from pathlib import Path

from corpus import Conversation, heldout
from evaluate import MAX_TOKENS


class Folder:
    """A checkpoint and its draft head in float32, where both ways round alike."""

    def __init__(self, path: Path) -> None:
        import mlx.core as mx
        from mlx_vlm import load
        from mlx_vlm.speculative.drafters import load_drafter

        self.model, self.processor = load(str(path))
        self.head, self.kind = load_drafter(str(path))
        self.model.set_dtype(mx.float32)
        self.head.set_dtype(mx.float32)

    def answer(self, case: Conversation, **options: object) -> list[int]:
        """The tokens of the answer."""
        from mlx_vlm.generate.dispatch import stream_generate

        prompt = self.processor.tokenizer.apply_chat_template(
            case.messages[:-1], tools=case.tools, add_generation_prompt=True, tokenize=False
        )
        parts = stream_generate(
            self.model, self.processor, prompt, max_tokens=MAX_TOKENS, temperature=0.0, **options
        )
        return [part.token for part in parts if part.token is not None]

    def drafted(self, case: Conversation) -> tuple[list[int], list[int], list[int]]:
        """(tokens, drafts accepted in each pass, drafts made in each pass)."""
        tokens = self.answer(case, draft_model=self.head, draft_kind=self.kind)
        return tokens, list(self.head.accept_lens), list(self.head.draft_lens)


def evaluate(folder: Folder, cases: list[Conversation]) -> dict[str, Counter]:
    """task -> counts of answers, equal answers, passes, drafts made and drafts accepted."""
    tasks: dict[str, Counter] = {}
    for case in cases:
        plain = folder.answer(case)
        tokens, accepted, made = folder.drafted(case)
        tasks.setdefault(case.task, Counter()).update(
            answers=1,
            equal=int(tokens == plain),
            passes=len(accepted),
            accepted=sum(accepted),
            made=sum(made),
        )
    return tasks


def shown(name: str, count: Counter) -> str:
    """One line of the result."""
    passes = max(1, count["passes"])
    return (
        f"{name:16s} accepted {count['accepted'] / passes:.2f} of {count['made'] / passes:.2f} "
        f"a pass ({count['passes']} passes), equal {count['equal']}/{count['answers']}"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--seed", type=int, default=300)
    args = parser.parse_args()
    cases = [case for case in heldout(args.seed, args.per_task) if not case.pictures]
    tasks = evaluate(Folder(args.folder), cases)
    for name, count in tasks.items():
        print(shown(name, count))
    print(shown("all", sum(tasks.values(), Counter())))


if __name__ == "__main__":
    main()
