"""What the hybrid family (Qwen3.5: gated delta net and attention) needs besides a configuration.

Its draft head guesses the token after the next one from what the model made of the last token
and from the next token's embedding, as the multi-token prediction of the Qwen3.5 checkpoints
does, so that a decoder can verify several tokens in one pass.
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from delta_rule import delta_rule
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm


class DraftHead(torch.nn.Module):
    """One attention layer on top of the model, under the names of the published checkpoints."""

    def __init__(self, config) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types = ["full_attention"]
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, 0)])
        self.norm = Qwen3_5RMSNorm(size, eps)
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(
        self, rotary: torch.nn.Module, next_token: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """(rows, length, size) each; a draft's hidden state stands for the model's in the next.

        Positions count from 0 and know no picture's grid, as mlx_vlm 0.7.10 runs the head.
        """
        parts = [self.pre_fc_norm_embedding(next_token), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(parts, -1))
        positions = torch.arange(x.shape[1]).expand(3, x.shape[0], -1)
        x = self.layers[0](x, position_embeddings=rotary(x, positions))
        return self.norm(x)


def drafts(
    model: torch.nn.Module, ids: torch.Tensor, hidden: torch.Tensor, count: int
) -> Iterator[torch.Tensor]:
    """Yield the head's hidden states, draft by draft: at i they stand for the token i + 2 + draft.

    The model's own weights learn nothing from them.
    """
    embedded = F.embedding(ids, model.lm_head.weight.detach())
    hidden = hidden.detach()
    for draft in range(count):
        hidden = model.mtp(
            model.model.language_model.rotary_emb, embedded[:, draft + 1 :], hidden[:, :-1]
        )
        yield hidden


def prepare(model: torch.nn.Module) -> torch.nn.Module:
    """Give the model its draft head and the delta rule that is fast here."""
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    model.mtp = DraftHead(model.config.text_config)
    return model


def from_attention(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Take over what the attention-only family's weights have in common with the model.

    Layers of the other kind and the draft head start from nothing.
    """
    own, heads = model.state_dict(), model.config.text_config.num_attention_heads
    fitted = {name: _fitted(name, value, heads) for name, value in weights.items()}
    taken = {
        name: value
        for name, value in fitted.items()
        if name in own and own[name].shape == value.shape
    }
    model.load_state_dict(taken, strict=False)


def _fitted(name: str, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Norms of this family are centred on 0; a gate of weight 0 halves what attention says."""
    if name.endswith("q_proj.weight"):
        query = value.unflatten(0, (heads, -1))
        return torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1)
    if name.endswith("o_proj.weight"):
        return 2 * value
    if name.startswith("model.language_model.") and name.endswith("norm.weight"):
        return value - 1
    return value
