"""The architecture, in mlx-lm's terms: a model's class and the class of its arguments."""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models import llama


@dataclass
class Arguments(llama.ModelArgs):
    """Entries of `config.json`."""

    logit_cap: float = 30.0


class Model(llama.Model):
    """Llama's layers; no logit leaves `-logit_cap .. logit_cap`."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        logits = super().__call__(inputs, cache, input_embeddings)
        return self.args.logit_cap * mx.tanh(logits / self.args.logit_cap)
