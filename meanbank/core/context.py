"""Context: what every layer may look at besides its own input."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from meanbank.core.layout import Layout
from meanbank.core.table import StoredTable, Table


@dataclasses.dataclass(frozen=True)
class Context:
    """Immutable; goes into and comes out of every block.

    token_ids: (B, T), or None when the model was given embeddings only.
    embedding: x0, the normalised token embeddings (B, T, hidden_size).
    layout: where the tokens stand.
    first_values: values published by the layers that others refer to, layer -> (B, T, Hkv * Dv).
    shared_table: a table over token ids that several layers share, (vocabulary, Hkv * Dv).
    """

    token_ids: Tensor | None
    embedding: Tensor
    layout: Layout
    first_values: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    shared_table: Table | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Context":
        """The same on another device, where the blocks of a model are spread over several."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        shared = self.shared_table  # a stored one stays where it is
        if not isinstance(shared, StoredTable):
            shared = moved(shared)
        return dataclasses.replace(
            self,
            token_ids=moved(self.token_ids),
            embedding=self.embedding.to(device, non_blocking=non_blocking),
            first_values={
                layer: values.to(device, non_blocking=non_blocking)
                for layer, values in self.first_values.items()
            },
            shared_table=shared,
        )

    def publish(self, layer: int, values: Tensor) -> "Context":
        return dataclasses.replace(self, first_values={**self.first_values, layer: values})
