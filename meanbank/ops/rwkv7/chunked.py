"""The RWKV-7 recurrence by chunks: matrix products inside a chunk, one from each to the next.

With `a = -removal_key`, `b = removal_key * rate`, and `c_t` the sum of log_decay since the start of
a chunk that begins with state S, what a token removes, `u_t = S_{t-1} a_t`, solves the unit lower
triangular system

    u_t = S (e^{c_{t-1}} a_t) + sum_{j<t} (a_t . e^{c_{t-1} - c_j} b_j) u_j
                              + sum_{j<t} (a_t . e^{c_{t-1} - c_j} k_j) v_j

(the WY form of a product of diagonal plus rank-one matrices, as in DeltaNet, arXiv 2406.06484). It
is linear in S, so a chunk maps its state by `S -> S transition + addition` and outputs are
`S read + fresh`, all four known for every chunk at once before any state is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32  # fastest of 8, 16, 32 and 64 on a CPU (64 channels, 8 heads, 1024 tokens)


def rwkv7_chunked(
    receptance: Tensor,
    log_decay: Tensor,
    key: Tensor,
    value: Tensor,
    removal_key: Tensor,
    rate: Tensor,
    state: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """See `meanbank.ops.rwkv7.rwkv7_recurrence`, which checks the arguments."""
    length = key.shape[2]
    chunk = min(chunk, length)
    replaced = removal_key * rate
    r, log_w, k, v, a, b = (
        cut(x, chunk) for x in (receptance, log_decay, key, value, -removal_key, replaced)
    )
    after = log_w.cumsum(dim=-2)  # c_t
    total = after[..., -1:, :]
    # Sums from the start of the chunk keep outputs free, in every bit, of what comes later; the
    # fastest decay of RWKV-7 leaves e^{-c_j} below 3e8.
    reads = torch.cat([a * (after - log_w).exp(), r * after.exp()], dim=-2)
    writes = torch.cat([b, k], dim=-2) * (-after).exp().repeat(1, 1, 1, 2, 1)
    scores = (reads @ writes.mT).masked_fill(hidden(chunk, writes.device), 0.0)
    ab, ak, rb, rk = (part for rows in scores.chunk(2, -2) for part in rows.chunk(2, -1))
    a_start, r_start = reads.chunk(2, dim=-2)

    solved = torch.linalg.solve_triangular(
        -ab, torch.cat([a_start, ak @ v], dim=-1), upper=False, unitriangular=True
    )
    removed = rb @ solved
    key_dim = k.shape[-1]
    read, fresh = r_start + removed[..., :key_dim], rk @ v + removed[..., key_dim:]
    end_b, end_k = (writes * total.exp()).chunk(2, dim=-2)
    moved = solved.mT @ end_b  # (B, H, N, Dk + Dv, Dk)
    transition = moved[..., :key_dim, :] + torch.diag_embed(total[..., 0, :].exp())
    addition = moved[..., key_dim:, :] + v.mT @ end_k

    starts = []
    for step, new in zip(transition.unbind(2), addition.unbind(2), strict=True):
        starts.append(state)
        state = state @ step + new
    output = read @ torch.stack(starts, dim=2).mT + fresh
    return output.flatten(2, 3)[:, :, :length], state


def cut(x: Tensor, chunk: int) -> Tensor:
    """(B, H, T, D) -> (B, H, N, chunk, D); the zeros at the end leave a state as it is."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


def hidden(chunk: int, device: torch.device) -> Tensor:
    """(2C, 2C) mask: what is removed depends on earlier tokens, outputs on their own token too."""
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=device)
    return torch.cat([ones.triu(), ones.triu(1)]).repeat(1, 2)
