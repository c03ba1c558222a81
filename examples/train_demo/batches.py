"""From conversations to training batches: token ids, labels, M-RoPE positions, pictures."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import Conversation
from pictures import Picture, patches
from transformers import PreTrainedTokenizerFast

IGNORE = -100
CELL = 32  # pixels an image token covers in each direction
ANSWER = re.compile(
    re.escape("<|im_start|>assistant\n") + "(.*?" + re.escape("<|im_end|>") + ")", re.DOTALL
)


@dataclass
class Row:
    """One conversation as the model sees it."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    pictures: list[Picture]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Batch:
    """The model's inputs and the labels of one step."""

    inputs: dict
    labels: torch.Tensor


class Encoder:
    """Turns conversations into rows; only what the assistant says is learnt."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.image = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.pad = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def __call__(self, conversation: Conversation) -> Row:
        """Tokens, labels and positions of one conversation."""
        grids = [tuple(side // CELL for side in p.size) for p in conversation.pictures]
        left = iter(grids)
        text = self.tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools, tokenize=False
        )
        text = re.sub(
            re.escape("<|image_pad|>"), lambda match: match[0] * math.prod(next(left)), text
        )
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = np.array(encoded["input_ids"], np.int64)
        starts = np.array([start for start, _ in encoded["offset_mapping"]])
        labels = np.full(len(ids), IGNORE, np.int64)
        for match in ANSWER.finditer(text):
            inside = (starts >= match.start(1)) & (starts < match.end(1))
            labels[inside] = ids[inside]
        return Row(ids, labels, self._positions(ids, grids), conversation.pictures)

    def _positions(self, ids: np.ndarray, grids: list[tuple[int, ...]]) -> np.ndarray:
        """M-RoPE: text counts on all three axes, an image token has its place in the grid."""
        positions = np.zeros((3, len(ids)), np.int64)
        left, at, i = iter(grids), 0, 0
        while i < len(ids):
            if ids[i] != self.image:
                positions[:, i] = at
                at, i = at + 1, i + 1
                continue
            width, height = next(left)
            span = slice(i, i + width * height)
            positions[0, span] = at
            positions[1, span] = at + np.repeat(np.arange(height), width)
            positions[2, span] = at + np.tile(np.arange(width), height)
            at, i = at + max(width, height), i + width * height
        return positions


def collate(rows: list[Row], pad: int) -> Batch:
    """Pad on the right: attention is causal, so no answer ever sees the padding."""
    length = max(map(len, rows))
    ids = np.full((len(rows), length), pad, np.int64)
    labels = np.full((len(rows), length), IGNORE, np.int64)
    positions = np.zeros((3, len(rows), length), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row.ids
        labels[i, : len(row)] = row.labels
        positions[:, i, : len(row)] = row.positions
    inputs = {
        "input_ids": torch.from_numpy(ids),
        "position_ids": torch.from_numpy(positions),
        "use_cache": False,
    }
    drawn = [patches(picture) for row in rows for picture in row.pictures]
    if drawn:
        pixels, grids = zip(*drawn, strict=True)
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
        inputs["image_grid_thw"] = torch.tensor(grids)
    return Batch(inputs, torch.from_numpy(labels))


def endless(rows: list[Row], pad: int, tokens: int, seed: int) -> Iterator[Batch]:
    """Batches of rows of like length, about `tokens` tokens each, for ever."""
    r = random.Random(seed)
    while True:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]) + r.uniform(0, 16))
        groups, group = [], []
        for i in order:
            group.append(i)
            if len(group) * len(rows[i]) >= tokens:
                groups.append(group)
                group = []
        r.shuffle(groups)
        for group in groups:
            yield collate([rows[i] for i in group], pad)
