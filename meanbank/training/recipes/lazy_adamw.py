"""AdamW that sees only the rows of a table that a batch has looked up."""

from typing import Any, cast

import torch
from torch import Tensor

from meanbank.core.sharded_table import own_rows


class LazyAdamW(torch.optim.AdamW):
    """AdamW for parameters with sparse gradients: rows without a gradient are left as they are.

    A row that a batch looked up is decayed, has its moments updated and moves as in AdamW; of the
    others nothing is read or written: neither do their moments decay, nor does old momentum move
    them, nor weight decay. The first step is dense AdamW's but for the decay of the others. Later
    a row that one step in n looks up moves less than with AdamW, for its second moment does not
    fall in between (at equal gradients and betas .8 and .995, in steps 3,000 to 6,000: n = 4, 25
    and 100 half, a quarter and a quarter as far), and it is decayed in one step of n.
    `torch.optim.SparseAdam` does the same, but without decay and with an eps that is divided by
    the root of the step's bias correction.

    A table may be divided over ranks: each updates the rows that it has.

    State: step, exp_avg and exp_avg_sq, whole tables as AdamW's. Groups as AdamW's: lr, betas, eps
    and weight_decay. Raises ValueError for a gradient that is not sparse.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the rows that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = cast(Tensor, parameter.grad)
        if not gradient.is_sparse:
            raise ValueError(
                f"the gradient of a table {tuple(parameter.shape)} is dense; look it up with "
                "sparse gradients (`set_table_gradients`) or set table_gradients: dense"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        gradient = gradient.coalesce()  # what look-ups of the same row gave, added up
        table, first_row = own_rows(parameter)
        moments, squares = (own_rows(state[key])[0] for key in ("exp_avg", "exp_avg_sq"))
        rows, values = gradient.indices()[0] - first_row, gradient.values()
        first = moments[rows].lerp_(values, 1 - beta1)
        second = squares[rows].mul_(beta2).addcmul_(values, values, value=1 - beta2)
        moments[rows], squares[rows] = first, second
        root = (second.sqrt_() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        new = table[rows].mul_(1 - group["lr"] * group["weight_decay"])
        table[rows] = new.addcdiv_(first, root, value=-group["lr"] / (1 - beta1**step))
