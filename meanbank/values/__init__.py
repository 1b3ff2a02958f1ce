"""Axis 2: value sources. Importing this package registers them all."""

from meanbank.values.bank import Bank
from meanbank.values.base import Place, ValueSource, ValueSourceConfig
from meanbank.values.projected import Projected

__all__ = ["Bank", "Place", "Projected", "ValueSource", "ValueSourceConfig"]
