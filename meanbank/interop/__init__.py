"""The two papers' checkpoints, read into ours and written back."""

from meanbank.interop.conversion import Conversion
from meanbank.interop.kvm_paper import export_kvm_paper, import_kvm_paper
from meanbank.interop.nanochat import import_nanochat

__all__ = ["Conversion", "export_kvm_paper", "import_kvm_paper", "import_nanochat"]
