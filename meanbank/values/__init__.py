"""Axis 2: value sources. Importing this package registers them all."""

from meanbank.values.bank import Bank
from meanbank.values.base import Place, ValueSource, ValueSourceConfig
from meanbank.values.first_layer import FirstLayer
from meanbank.values.gated_additive import GatedAdditive
from meanbank.values.initial_embedding import InitialEmbedding
from meanbank.values.mixed import Mixed
from meanbank.values.projected import Projected

__all__ = [
    "Bank",
    "FirstLayer",
    "GatedAdditive",
    "InitialEmbedding",
    "Mixed",
    "Place",
    "Projected",
    "ValueSource",
    "ValueSourceConfig",
]
