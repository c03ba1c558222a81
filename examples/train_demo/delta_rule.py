"""The gated delta rule in chunks, for training on a CPU."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

CHUNK = 16  # tokens


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _chunks(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(rows, length, own heads, ...) to (rows, heads, chunks, CHUNK, ...), padded with zeros."""
    x = x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)
    pad = -x.shape[2] % CHUNK
    x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, pad))
    return x.unflatten(2, (-1, CHUNK)).contiguous()


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What q_t reads of S_t = exp(g_t) (1 - beta_t k_t k_t') S_(t-1) + beta_t k_t v_t', S_0 = 0.

    Shapes: query and key (rows, length, key heads, size), value (rows, length, heads, size), g and
    beta (rows, length, heads); returns (rows, length, heads, size). Stands for
    `torch_chunk_gated_delta_rule` of transformers 5.23 in training, whose mathematics it shares
    (Gated Delta Networks, arXiv 2412.06464); it takes a CPU less time, as chunks of 16 tokens
    instead of 64 pad short rows less, and as no slice has a whole tensor for its gradient.
    """
    length, heads = value.shape[1:3]
    query = _unit(query) * query.shape[-1] ** -0.5
    q, k, v, g, beta = (_chunks(x, heads) for x in (query, _unit(key), value, g, beta))
    decay = g.cumsum(-1)
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~past, -torch.inf).exp()
    k_beta, k_t = k * beta[..., None], k.transpose(-1, -2)
    # what each token writes, and what it takes away from the state before the chunk
    written = torch.cat([v * beta[..., None], k_beta * decay[..., None].exp()], -1)
    written = torch.linalg.solve_triangular(
        (k_beta @ k_t) * between, written, upper=False, unitriangular=True
    )
    new, taken = written.split([v.shape[-1], k.shape[-1]], -1)
    inside = (q @ k_t) * between
    q = q * decay[..., None].exp()
    k_t = k_t * (decay[..., -1:] - decay).exp()[..., None, :]
    kept = decay[..., -1, None, None].exp()
    parts = (x.flatten(0, 1).unbind(1) for x in (new, taken, q, inside, k_t, kept))
    reads = torch.cat(list(_scan(zip(*parts, strict=True))), 1)[:, :length]
    return reads.unflatten(0, (-1, heads)).transpose(1, 2), None


def _scan(chunks: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[torch.Tensor]:
    """Yield what each chunk reads; only the state goes from one to the next."""
    state = None
    for new, taken, q, inside, k_t, kept in chunks:
        if state is None:
            state = torch.zeros_like(k_t @ new)
        change = torch.baddbmm(new, taken, state, alpha=-1)
        yield torch.baddbmm(q @ state, inside, change)
        state = torch.baddbmm(kept * state, k_t, change)
