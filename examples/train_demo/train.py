#!/usr/bin/env python
"""Train the demo model from nothing on a CPU.

    pip install torch transformers tokenizers pillow numpy jinja2 safetensors
    torchrun --nproc-per-node 2 train.py OUT --minutes 45
    torchrun --nproc-per-node 2 train.py OUT --minutes 60 --family qwen3_5

(Plain `python train.py ...` uses one process.) OUT receives a Hugging Face folder that
transformers, mlx_vlm and mlx_lm load, and its weights anew with every line of the log. The learning
rate follows the wall clock, so that the run ends well whatever the machine's speed.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Hugging Face is never asked: everything is made here
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hybrid
import numpy as np
import torch
import torch.nn.functional as F
from batches import IGNORE, Batch, Encoder, collate, endless
from checkpoint import Size, make_tokenizer, write_files
from corpus import heldout, training
from families import FAMILIES
from safetensors.torch import load_file, save_file
from team import Team
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

LONGEST = 900  # tokens; longer conversations are rare and slow
TOKENIZER_SAMPLE = 12000  # conversations
REPORT_EVERY, CHECK_EVERY = 100, 500  # steps
DRAFTS = 2  # in a row, each from the hidden state of the one before
WEIGHTS = "model.safetensors"
EMBEDDING = "model.language_model.embed_tokens.weight"  # and output layer


Scores = dict[str, torch.Tensor]


def _score(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple:
    """(cross entropy, token accuracy) over what the assistant says."""
    said = labels != IGNORE
    logits = F.linear(hidden[said], weight)
    accuracy = (logits.argmax(-1) == labels[said]).float().mean()
    return F.cross_entropy(logits, labels[said]), accuracy


def score(model: torch.nn.Module, batch: Batch) -> Scores:
    """Losses and accuracies of the model and, where it has a draft head, of each draft."""
    hidden, weight = model.model(**batch.inputs).last_hidden_state, model.lm_head.weight
    loss, accuracy = _score(hidden[:, :-1], weight, batch.labels[:, 1:])
    scores = {"loss": loss, "accuracy": accuracy}
    if not hasattr(model, "mtp"):
        return scores
    guesses = hybrid.drafts(model, batch.inputs["input_ids"], hidden, DRAFTS)
    for draft, guess in enumerate(guesses, 1):
        labels = batch.labels[:, draft + 1 :]
        loss, accuracy = _score(guess[:, :-1], weight.detach(), labels)
        scores |= {f"draft{draft}_loss": loss, f"draft{draft}_accuracy": accuracy}
    return scores


def _numbers(scores: Scores) -> dict[str, float]:
    return {name: value.item() for name, value in scores.items()}


def _mean(numbers: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([entry[name] for entry in numbers])) for name in numbers[0]}


@torch.no_grad()
def check(model: torch.nn.Module, batches: list[Batch]) -> dict[str, float]:
    """Mean scores on held-out conversations."""
    scores = _mean([_numbers(score(model, batch)) for batch in batches])
    return {f"held_out_{name}": value for name, value in scores.items()}


def learning_rate(peak: float, step: int, done: float) -> float:
    """Warm-up over 100 steps, then a cosine down to 2 % of the peak; `done` runs from 0 to 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1, done)))
    return peak * min(1, (step + 1) / 100) * (0.02 + 0.98 * cosine)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW; norms and biases are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def steps(
    model: torch.nn.Module, batches: Iterator[Batch], team: Team, minutes: float, peak: float
) -> Iterator[dict]:
    """Train until the minutes are over; yields each step's numbers."""
    optimizer = make_optimizer(model)
    start = time.time()
    for step, batch in enumerate(batches):
        done = team.agree((time.time() - start) / (60 * minutes))
        if done >= 1:
            return
        rate = learning_rate(peak, step, done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        scores = score(model, batch)
        optimizer.zero_grad(set_to_none=True)
        sum(value for name, value in scores.items() if name.endswith("loss")).backward()
        team.average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield {
            "step": step + 1,
            "seconds": round(time.time() - start),
            "tokens": batch.labels.numel() * team.size,
            "scores": _numbers(scores),
        }


def _shown(entry: dict) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in entry.items()
    )


def train(
    model: torch.nn.Module,
    batches: Iterator[Batch],
    tests: list[Batch],
    team: Team,
    args: argparse.Namespace,
) -> list[dict]:
    """The loop with its log, which is printed as it grows; every line of it saves the weights."""
    log, recent, tokens = [], [], 0
    for numbers in steps(model, batches, team, args.minutes, args.lr):
        tokens += numbers["tokens"]
        recent.append(numbers["scores"])
        if numbers["step"] % REPORT_EVERY or not team.leads:
            continue
        entry = {"step": numbers["step"], "seconds": numbers["seconds"], "tokens": tokens}
        entry |= _mean(recent)
        recent = []
        if numbers["step"] % CHECK_EVERY == 0:
            entry |= check(model, tests)
        save_weights(model, args.out / WEIGHTS)
        log.append(entry)
        print(_shown(entry), flush=True)
    return log


def save_weights(model: torch.nn.Module, path: Path) -> int:
    """Write the weights in bfloat16 (the output layer is the embedding); returns their bytes.

    The decay rates of a recurrent layer stay in float32: they are few, and each step multiplies.
    """
    weights = {
        name: (value if name.endswith("A_log") else value.to(torch.bfloat16)).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes files only their owner may read
    return path.stat().st_size


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument(
        "--init",
        type=Path,
        help="go on from this folder's tokenizer and weights; of another family, from those that "
        "both have",
    )
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--conversations", type=int, default=80000, help="of all")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a process's batch")
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", type=Path, help="write the numbers of the run here as JSON")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """A new model of the configuration in args.out, with what it can use of args.init."""
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(args.out)).float()
    if args.family == "qwen3_5":
        hybrid.prepare(model)
    if not args.init:
        return model
    weights = load_file(args.init / WEIGHTS)
    if AutoConfig.from_pretrained(args.init).model_type == args.family:
        model.load_state_dict(weights | {"lm_head.weight": weights[EMBEDDING]})
    else:
        hybrid.from_attention(weights, model)
    return model


def prepare_folder(args: argparse.Namespace) -> None:
    """Write the files the weights go beside."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    else:
        tokenizer = make_tokenizer(training(args.seed, TOKENIZER_SAMPLE), Size())
    write_files(args.out, args.family, tokenizer, Size())


def main() -> None:
    """Make the corpus, the tokenizer and the model; train; save."""
    args, team, start = arguments(), Team(), time.time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if team.leads:
        prepare_folder(args)
    team.wait()
    encoder = Encoder(args.out)
    # each process makes its own conversations
    seed = args.seed * 1000 + team.rank
    conversations = training(seed, args.conversations // team.size)
    rows = [row for row in map(encoder, conversations) if len(row) <= LONGEST]
    held_out = sorted(map(encoder, heldout(100, 20)), key=len)
    tests = [collate(held_out[i : i + 10], encoder.pad) for i in range(0, len(held_out), 10)]
    model = make_model(args)
    if team.leads:
        print(
            f"[{time.time() - start:.0f}s] {team.size} x {len(rows)} conversations of "
            f"{np.mean(list(map(len, rows))):.0f} tokens, vocabulary {len(encoder.tokenizer)}, "
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.3f} M parameters",
            flush=True,
        )
    batches = endless(rows, encoder.pad, args.tokens, seed)
    log = train(model, batches, tests, team, args)
    if not team.leads:
        return
    size = save_weights(model, args.out / WEIGHTS)
    if args.history:
        args.history.write_text(json.dumps(log, indent=0) + "\n")
    print(f"[{time.time() - start:.0f}s] saved {size / 1e6:.2f} MB to {args.out}")


if __name__ == "__main__":
    main()
