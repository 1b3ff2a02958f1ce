"""The training loop."""

import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.progress import progress
from meanbank.core.provenance import produced_by
from meanbank.data import IGNORED, Batch
from meanbank.evaluation import BitsPerByte, run_evaluation
from meanbank.model import MeanbankForCausalLM
from meanbank.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from meanbank.training.config import RunConfig
from meanbank.training.gradients import clip, numbers_of
from meanbank.training.metrics import Metrics
from meanbank.training.recipes import Optimizers
from meanbank.training.run import (
    METRICS,
    TrainingData,
    check_free,
    check_resumable,
    check_same_data,
    choose_device,
    make_run,
    open_data,
    subject_of,
    write_run_info,
)


class Interrupted(Exception):
    """Training stopped by a signal, after a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number = number


class NonFiniteError(ValueError):
    """A loss, a gradient or a weight is not finite; training stops before it spreads."""


def train(config: RunConfig, out: str | Path, *, resume: bool = False, force: bool = False) -> Path:
    """Train a model; returns the run folder.

    Raises ValueError for a folder in the way or a configuration that does not fit,
    NonFiniteError before an update with a non-finite loss or gradient, and Interrupted after
    SIGINT or SIGTERM, with a checkpoint written.
    """
    out = Path(out)
    device = choose_device(config.training.device)
    if resume:
        check_resumable(out, config)
    else:
        check_free(out, force=force)  # before minutes go into the data
    data = open_data(config)
    if resume:
        check_same_data(out, data)
    torch.manual_seed(config.training.seed)
    model = MeanbankForCausalLM(config.model_config(data.vocab_size, data.end_of_text_id))
    if data.corpus is not None:  # padding of the vocabulary stands for no text
        padding = range(data.corpus.vocab_size, data.vocab_size)
        model.generation_config.suppress_tokens = list(padding) or None
    model.to(device)  # pyright: ignore[reportArgumentType]
    model.train()
    warn_of_idle_memories(model, config)
    if not resume:  # last: wrong input must leave what is there alone
        make_run(out, config, force=force)
    Trainer(config, out, model, data).run()
    return out


def warn_of_idle_memories(model: MeanbankForCausalLM, config: RunConfig) -> None:
    """Say so on stderr where no training sequence is long enough for a memory to compress any."""
    if config.data.recall is not None:
        return
    length = config.data.sequence_length
    for layer, block in enumerate(model.model.layers):
        exact = getattr(getattr(block.attention, "memory", None), "exact_tokens", None)
        if exact is not None and length <= exact:
            print(
                f"warning: layer {layer} keeps {exact} tokens exactly and training sequences have "
                f"{length}, so its compressed memory is never used; give it a smaller chunk_size",
                file=sys.stderr,
            )
            return


@dataclasses.dataclass
class Trainer:
    """One run: the loop and what it writes."""

    config: RunConfig
    out: Path
    model: MeanbankForCausalLM
    data: TrainingData
    tokens: int = 0

    def run(self) -> None:
        settings = self.config.training
        recipe = settings.recipe
        optimizer = recipe.optimizer(self.model, settings.steps)
        first = self._resume(optimizer)
        self._write_info()
        metrics = Metrics(self.out / METRICS, first)
        started = time.monotonic()
        title = f"train {self.out.name}"
        with stop_signals() as stop, progress(title, settings.steps, done=first) as report:
            try:
                for step in range(first, settings.steps):
                    began = time.monotonic()
                    recipe.set_step(optimizer, step, settings.steps, settings.warmup_steps)
                    batch = self.data.batches.batch(step).to(self.model.device)
                    loss, norm = self._update(optimizer, batch, recipe.clip, step)
                    self.tokens += batch.input_ids.numel()
                    speed = batch.input_ids.numel() / (time.monotonic() - began)
                    metrics.write(
                        step + 1,
                        loss=loss,
                        gradient_norm=norm,
                        learning_rate=optimizer.param_groups[0]["lr"],
                        tokens=self.tokens,
                        tokens_per_second=speed,
                        seconds=time.monotonic() - started,
                    )
                    report(1, f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                    self._after(step + 1, optimizer, metrics, stop())
            finally:
                metrics.close()

    def _update(
        self, optimizer: Optimizers, batch: Batch, largest: float | None, step: int
    ) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        loss = language_loss(self.model, batch)
        if not torch.isfinite(loss):
            place = locate_non_finite(self.model, batch)
            raise NonFiniteError(f"the loss is {loss.item()} at step {step + 1}, first in {place}")
        loss.backward()
        gradients = numbers_of(self.model)
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not torch.isfinite(norm):
            names = [name for name, gradient in gradients.items() if not _finite(gradient)]
            raise NonFiniteError(
                f"a gradient is not finite at step {step + 1}, first in {names[-1]}"
            )
        if largest is not None:
            clip(gradients.values(), largest, norm)
        optimizer.step()
        return loss.item(), norm.item()

    def _after(
        self, step: int, optimizer: Optimizers, metrics: Metrics, stopped: int | None
    ) -> None:
        """Evaluate and save where it is due; stop where it was asked for."""
        settings = self.config.training
        last = step == settings.steps
        due = settings.evaluate_every and step % settings.evaluate_every == 0
        if self.data.corpus is not None and (due or last):
            subject = subject_of(self.config, self.model, self.data.corpus)
            held_out = BitsPerByte(max_tokens=settings.evaluation_tokens)
            bpb = run_evaluation(held_out, subject).results["bpb"]
            self.model.train()
            if not math.isfinite(bpb):
                raise NonFiniteError(f"the held-out loss is {bpb} after step {step}")
            metrics.write(step, held_out_bpb=bpb)
        due = settings.checkpoint_every and step % settings.checkpoint_every == 0
        if due or last or stopped is not None:
            broken = [n for n, p in self.model.named_parameters() if not _finite(p)]
            if broken:
                raise NonFiniteError(f"{broken[0]} is not finite after step {step}; not saved")
            save_checkpoint(
                self.out,
                step,
                self.model,
                optimizer,
                None if self.data.corpus is None else self.data.corpus.tokenizer,
                tokens=self.tokens,
                keep_last=settings.keep_last,
            )
        if stopped is not None and not last:
            raise Interrupted(stopped, step)

    def _resume(self, optimizer: Optimizers) -> int:
        """Load the last checkpoint, if there is one; returns the steps done."""
        found = checkpoints(self.out)
        if not found:
            return 0
        saved = load_checkpoint(found[-1], self.model, optimizer)
        self.tokens = saved["tokens"]
        return saved["step"]

    def _write_info(self) -> None:
        training, data = self.config.training, self.config.data
        facts = produced_by(
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            seed=training.seed,
        )
        tokens = data.batch_size * data.sequence_length * training.steps
        info = {
            **facts,
            "description": self.config.description,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": training.steps,
            "sequence_length": data.sequence_length,
            "tokens": None if self.data.corpus is None else tokens,
            "data": self.data.description,
        }
        write_run_info(self.out, info)


def language_loss(model: MeanbankForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not ignored."""
    logits = model(
        input_ids=batch.input_ids, document_ids=batch.document_ids, use_cache=False
    ).logits
    targets = batch.labels.flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@torch.no_grad()
def locate_non_finite(model: MeanbankForCausalLM, batch: Batch) -> str:
    """Name of the first module, in order of execution, with a non-finite output."""
    found: list[str] = []

    def watch(name: str) -> Callable:
        def hook(module, inputs, output) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            bad = any(isinstance(part, Tensor) and not _finite(part) for part in parts)
            if bad and not found:
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
    try:
        language_loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss itself"


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the SIGINT or SIGTERM received since, or None.

    The first signal waits for the step at hand; a second one acts as usual.
    """
    received: list[int] = []
    previous = {}

    def handle(number, frame) -> None:
        received.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: signals are somebody else's
        previous.clear()
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
