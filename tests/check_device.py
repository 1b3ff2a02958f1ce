"""Whether a device computes what the CPU does: python -m tests.check_device [DEVICE]

DEVICE: cuda where there is one; `emulated`, which every machine has, see `tests.emulated_device`;
or another one of PyTorch's that has fp64: models are in that, so that the same tokens get rows of
their own on both. Exit code 1 where something fails.
"""

import argparse
import contextlib
import copy
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from meanbank import MeanbankCache, MeanbankForCausalLM, batch_invariant
from meanbank.evaluation import BitsPerByte, Parts, PositionLoss, Serving, run_evaluation
from meanbank.ops import kvm_attention
from meanbank.training import load_config, load_run, train
from meanbank.training.checkpoint import checkpoints
from tests.conformance.models import MEMORIES, SOURCES, make_model
from tests.emulated_device import NAME, Emulation, emulated
from tests.ops.test_kvm import inputs
from tests.training.faults import write_config

Numbers = Mapping[str, Tensor]
TOLERANCE = 1e-9  # of the largest number
FEW = ("kvm_power_law bank gptalpha2", "rwkv7 projection nanochat", "kvm fused", "train bov")


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[list[int]]:
    """How often the host waits for the device, as the list's one number, afterwards."""
    found = [0]
    if device.type == NAME:
        before = Emulation.current.waits
        yield found
        found[0] = Emulation.current.waits - before
    elif device.type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found[0] = sum("synchroniz" in str(each.message) for each in caught)
    else:
        yield found


def model_numbers(model: MeanbankForCausalLM, device: torch.device, folder: Path) -> Numbers:
    """What a model gives: trained, read at once and by the token, padded, packed, from a file."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (2, 23), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    documents = (torch.arange(23, device=device) // torch.tensor([[9], [5]], device=device)).long()
    found: dict[str, Tensor] = {}
    output = model(ids, targets=ids.roll(-1, 1), attention_mask=mask, document_ids=documents)
    output.loss.backward()
    found["losses"] = output.losses.detach()
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad(), waits(device) as waited:
        output = model(ids)
        for _ in range(2):
            found[f"token {_}"] = model(ids[:, :1], cache=output.cache).logits
    if device.type != "cpu":  # one a call: whether token ids are within the vocabulary
        assert waited[0] <= 3, f"{waited[0]} waits of the host in 3 calls"
    found["logits"] = output.logits.detach()
    with torch.no_grad():
        cache = model.model.new_cache()
        cache.activate_past_recording(3)
        cache.activate_provenance()
        found["padded"] = model(ids, attention_mask=mask, cache=cache).logits
        found["packed"] = model(ids, document_ids=documents, cache=cache).logits
        for _ in range(3):
            model(ids[:, :1], cache=cache)
        cache.crop(-2)
        cache = MeanbankCache.join([cache.select([1]), cache.repeat(2)])
        path = folder / "context"
        cache.save(path, model, overwrite=True)
        cache = MeanbankCache.load(path, model)
        found["from a file"] = model(ids[:1, :5].expand(5, -1), cache=cache).logits
        with batch_invariant():
            found["alone"] = model(ids, attention_mask=mask).logits
        found["generated"] = model.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        if device.type != NAME:  # whose tensors are nowhere
            assert cache.describe().nbytes >= cache.nbytes()
    return found


def check_model(device: torch.device, memory: str, source: str, backbone: str) -> None:
    model = make_model(memory, source, "grouped", torch.float64, layers=2, backbone=backbone)
    with tempfile.TemporaryDirectory() as folder:
        wanted = model_numbers(copy.deepcopy(model), torch.device("cpu"), Path(folder))
        compare(model_numbers(model.to(device), device, Path(folder)), wanted)


def check_operator(device: torch.device, backend: str) -> None:
    """With enough tokens for every path of the fused one, in two calls, and with gradients."""
    torch.manual_seed(0)
    sequence = inputs(150, batch=2, heads=4, kv_heads=2, key_dim=8)
    settings = {"rotary_dim": 4, "chunk_size": 16, "budget": lambda seen: 3 * seen**0.5}
    at = ("query", "key", "value", "merge_gate")

    def numbers(device: torch.device) -> Numbers:
        leaves = {n: x.detach().to(device).requires_grad_() for n, x in sequence.items()}
        memory, outputs = None, []
        for part in (slice(70), slice(70, None)):
            now = {n: x[:, :, part] if n in at else x for n, x in leaves.items()}
            output, memory = kvm_attention(
                **now, **settings, memory=memory, return_memory=True, backend=backend
            )
            outputs.append(output)
        total = sum((x**2).sum() for x in (*outputs, memory.rows.key, memory.rows.value))
        gradients = torch.autograd.grad(total, list(leaves.values()))
        return {"outputs": torch.cat(outputs, dim=2).detach()} | dict(
            zip(leaves, gradients, strict=True)
        )

    compare(numbers(device), numbers(torch.device("cpu")))


def check_storage(device: torch.device, storage: str) -> None:
    """Tables that stay in main memory."""
    ids = torch.randint(1, 40, (2, 9))
    with tempfile.TemporaryDirectory() as folder:
        make_model("full", "bank", "grouped", torch.float64).save_pretrained(folder)
        model = MeanbankForCausalLM.from_pretrained(folder, bank_storage=storage).eval()
        with torch.no_grad():
            wanted = {"logits": model(ids).logits}
            compare({"logits": model.to(device)(ids.to(device)).logits}, wanted)


def check_training(device: torch.device, *settings: str) -> None:
    """A run, to its end and gone on with, and evaluations of it, against the same on the CPU."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as held:
        folder = Path(name)
        held.enter_context(mock.patch.dict("os.environ", MEANBANK_CACHE=str(folder / "cache")))
        for module in ("trainer", "run"):  # a run names cpu or cuda only
            place = f"meanbank.training.{module}.choose_device"
            held.enter_context(mock.patch(place, lambda name: name and str(where)))
        found = []
        path = write_config(folder)
        for where in (device, torch.device("cpu")):
            out = folder / where.type
            config = load_config(
                path, ["training.steps=4", "training.checkpoint_every=2", *settings]
            )
            train(config, out)
            shutil.rmtree(checkpoints(out)[-1])
            train(config, out, resume=True)
            run = load_run(out)
            assert run.model.device.type == where.type
            subject = run.subject()
            scores = {
                f"{score} of {task.tag}": torch.tensor(value)
                for task in (BitsPerByte(), PositionLoss(), Parts(max_tokens=64))
                for score, value in run_evaluation(task, subject).scores.items()
            }
            run_evaluation(Serving(contexts=(32,)), subject)
            found.append({n: p.detach() for n, p in run.model.named_parameters()} | scores)
        compare(*found, tolerance=1e-3)  # in fp32


def compare(found: Numbers, wanted: Numbers, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == wanted.keys()
    for name, other in wanted.items():
        ours = found[name].cpu()
        assert ours.shape == other.shape and ours.dtype == other.dtype, name
        error = (ours.double() - other.double()).abs().max().item()
        assert error <= tolerance * max(1.0, other.abs().max().item()), f"{name}: {error:.1e} off"


def checks(device: torch.device) -> dict[str, Callable[[], None]]:
    """Everything to check, by name."""
    models = [
        *((memory, "bank", "gptalpha2") for memory in MEMORIES),
        *((memory, "projection", "nanochat") for memory in MEMORIES),
        *((memory, source, "gptalpha2") for source in SOURCES for memory in ("full", "rwkv7")),
    ]
    found = {" ".join(case): partial(check_model, device, *case) for case in models}
    found |= {f"kvm {b}": partial(check_operator, device, b) for b in ("reference", "fused")}
    found |= {f"tables {s}": partial(check_storage, device, s) for s in ("mmap", "int8")}
    for recipe in ("plain", "kvm", "bov"):
        found[f"train {recipe}"] = partial(check_training, device, f"training.recipe={recipe}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else NAME
    parser.add_argument("device", nargs="?", default=default)
    parser.add_argument("--few", action="store_true", help=", ".join(FEW))
    arguments = parser.parse_args()
    failed = 0
    context = emulated() if arguments.device == NAME else contextlib.nullcontext()
    with context:
        device = torch.device(arguments.device)
        everything = checks(device)
        for name in FEW if arguments.few else everything:
            try:
                everything[name]()
            except Exception:
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
            else:
                print(f"passed {name}", flush=True)
    print(f"{failed} failed on {arguments.device}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
