"""`meanbank import` and `meanbank export`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def import_checkpoint(
    format: Annotated[Literal["kvm-paper", "nanochat"], tyro.conf.Positional],
    source: Annotated[Path, tyro.conf.Positional],
    destination: Annotated[Path, tyro.conf.Positional],
    /,
    step: int | None = None,
) -> int:
    """Read a checkpoint of either paper's authors; `from_pretrained` then loads the result.

    Args:
        format: kvm-paper, a Hugging Face folder (config.json and safetensors), or nanochat, a
            folder of meta_STEP.json and model_STEP.pt, of which only tensors are unpickled.
        source: their folder.
        destination: a new folder.
        step: nanochat: which step. Default: the last.
    """
    from meanbank.interop import import_kvm_paper, import_nanochat

    if format == "nanochat":
        conversion = import_nanochat(source, destination, step)
    elif step is not None:
        raise ValueError("--step is for nanochat checkpoints only")
    else:
        conversion = import_kvm_paper(source, destination)
    for name, reason in conversion.dropped.items():
        print(f"dropped {name}: {reason}")
    parameters = sum(tensor.numel() for tensor in conversion.tensors.values())
    print(
        f"{destination}: {len(conversion.tensors)} tensors, {parameters:,} parameters, "
        f"{len(conversion.dropped)} dropped"
    )
    return 0


def export_checkpoint(
    format: Annotated[Literal["kvm-paper"], tyro.conf.Positional],
    source: Annotated[Path, tyro.conf.Positional],
    destination: Annotated[Path, tyro.conf.Positional],
    /,
) -> int:
    """Write a model as its paper's authors do.

    Args:
        format: kvm-paper, a Hugging Face folder that their code loads.
        source: a folder of ours: an imported model, or RUN/checkpoints/STEP.
        destination: a new folder.
    """
    from meanbank.interop import export_kvm_paper

    export_kvm_paper(source, destination)
    print(f"{destination}: config.json and model.safetensors")
    return 0
