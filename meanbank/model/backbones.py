"""The backbones by name."""

from meanbank.model.backbone import Backbone
from meanbank.model.gptalpha2 import GPTALPHA2
from meanbank.model.nanochat import NANOCHAT

BACKBONES: dict[str, Backbone] = {"gptalpha2": GPTALPHA2, "nanochat": NANOCHAT}
