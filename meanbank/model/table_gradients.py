"""Dense or sparse gradients of the tables that value sources look up."""

from typing import Literal

from torch import nn

from meanbank.values import ValueSource

TableGradients = Literal["dense", "sparse"]


def set_table_gradients(model: nn.Module, gradients: TableGradients) -> None:
    """From now on, the backward pass gives tables over token ids (`Role.TABLE`) such gradients.

    "sparse": `torch.sparse_coo` tensors with a row for each token that was looked up, repeated
    ids apart until they are coalesced, so that a backward pass costs what the batch has, not what
    the table has. Outputs and the other gradients are the same; nothing of it is saved with a
    model. For optimizers that take sparse gradients: `torch.optim.SGD` without momentum and decay
    does with them exactly what it does with dense ones.
    """
    for module in model.modules():
        if isinstance(module, ValueSource):
            module.sparse_gradients = gradients == "sparse"
