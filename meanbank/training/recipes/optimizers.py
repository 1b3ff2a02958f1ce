"""Several optimizers in one run, as one."""

from collections.abc import Sequence
from typing import Any

import torch


class Optimizers:
    """Optimizers over disjoint parameters with the surface of one.

    In its state dict the parameters are numbered through, part after part; with one part it is
    that optimizer's own.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts; changing one of them changes its optimizer."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        state, groups, first = {}, [], 0
        for part in self.parts:
            saved = part.state_dict()
            state |= {first + index: entries for index, entries in saved["state"].items()}
            for group in saved["param_groups"]:
                groups.append({**group, "params": [first + index for index in group["params"]]})
            first += sum(len(group["params"]) for group in part.param_groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the groups are not those of the parts."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"expected {len(self.param_groups)} groups, got {len(groups)}")
        for part in self.parts:
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            members = {index for group in own for index in group["params"]}
            kept = {index: entries for index, entries in state.items() if index in members}
            part.load_state_dict({"state": kept, "param_groups": own})
