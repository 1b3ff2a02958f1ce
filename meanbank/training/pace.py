"""How well a run uses its machine, and what a step spends besides training."""

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meanbank.model import MeanbankForCausalLM
from meanbank.training.planning import flops_per_token


class Pace:
    """Figures of each step: `logging_seconds`, and `utilization` where a ceiling is known.

    logging_seconds: of the step outside its parts, and of what came between the step before and
    this one in `logging`. utilization: the model's FLOPs a second, counted exactly as
    `meanbank plan` does and whole rows whatever documents are in them, over `ceiling`, the FLOPs
    a second of a matrix product on this machine.
    """

    def __init__(self, model: MeanbankForCausalLM, ceiling: float | None = None) -> None:
        self.ceiling = ceiling
        self._model = model
        self._flops: dict[int, float] = {}  # a token, by length of its row
        self._logging = 0.0

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Within it nothing is trained but told."""
        began = time.perf_counter()
        yield
        self._logging += time.perf_counter() - began

    def figures(
        self, input_ids: Tensor, seconds: float, parts: Mapping[str, float]
    ) -> dict[str, float]:
        """Of a step on input_ids (B, T) that took so long, these parts of it among that."""
        figures = {"logging_seconds": max(0.0, seconds - sum(parts.values())) + self._logging}
        self._logging = 0.0
        if self.ceiling is not None:
            flops = self._flops_per_token(input_ids.shape[1]) * input_ids.numel()
            figures["utilization"] = flops / seconds / self.ceiling
        return figures

    def _flops_per_token(self, length: int) -> float:
        if length not in self._flops:
            parts = flops_per_token(self._model, length, "exact").values()
            self._flops[length] = sum(part.total for part in parts)
        return self._flops[length]


def measured_ceiling(model: MeanbankForCausalLM, dtype: torch.dtype) -> float:
    """FLOPs a second of a product in that dtype on the model's device; takes about a second.

    On a CPU with as many threads as there are now; with one, by CPU time of the process, so that
    other processes do not lower it.
    """
    from meanbank.benchmarks.ceilings import product_flops_per_second
    from meanbank.benchmarks.settings import Machine

    machine = Machine(device=model.device.type, threads=torch.get_num_threads())
    return product_flops_per_second(machine, dtype)
