"""The training loop."""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.progress import progress
from meanbank.data import IGNORED, Batch
from meanbank.data.ahead import batches_ahead
from meanbank.evaluation import BitsPerByte, run_evaluation
from meanbank.model import MeanbankForCausalLM
from meanbank.training.checkpoint import checkpoints, load_checkpoint, snapshot
from meanbank.training.claim import check_unclaimed, claimed, recorded
from meanbank.training.config import RunConfig, due
from meanbank.training.finite import (
    NonFiniteError,
    is_finite,
    locate_non_finite,
    non_finite_names,
)
from meanbank.training.gradients import clip, numbers_of
from meanbank.training.metrics import Metrics, Stopwatch
from meanbank.training.pace import Pace, measured_ceiling
from meanbank.training.positions import PositionLosses
from meanbank.training.run import (
    METRICS,
    STATISTICS,
    TrainingData,
    check_free,
    check_resumable,
    check_same_data,
    choose_device,
    config_hash,
    make_run,
    open_data,
    subject_of,
    write_config,
    write_run_info,
)
from meanbank.training.signals import Interrupted, StopSignals
from meanbank.training.statistics import StatisticsLog
from meanbank.training.trackers import check_trackers, tracking
from meanbank.training.writer import CheckpointWriter

HELD_OUT = "held_out_bpb"


class _Left(Exception):
    """An evaluation that a signal has ended."""


def train(config: RunConfig, out: str | Path, *, resume: bool = False, force: bool = False) -> Path:
    """Train a model; returns the run folder.

    Raises ValueError for a folder in the way or a configuration that does not fit,
    NonFiniteError before an update with a non-finite loss or gradient, and Interrupted after
    SIGINT or SIGTERM, with a checkpoint written.
    """
    out = Path(out)
    device = choose_device(config.training.device)
    check_trackers(config.training.trackers)
    check_unclaimed(out)
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
    with claimed(out):  # last: wrong input must leave what is there alone
        if resume:
            check_resumable(out, config)
            write_config(out, config)  # with what may have changed
        else:
            make_run(out, config, force=force)
        with recorded(out):
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


class Trainer:
    """One run: the loop and what it writes."""

    def __init__(
        self, config: RunConfig, out: Path, model: MeanbankForCausalLM, data: TrainingData
    ) -> None:
        self.config, self.out, self.model, self.data = config, out, model, data
        settings = config.training
        self.optimizer = settings.recipe.optimizer(model, settings.steps)
        self.writer = CheckpointWriter(
            out, keep_last=settings.keep_last, keep_every=settings.keep_every
        )
        self.facts = {"config": config_hash(config), "data": data.description.get("fingerprint")}
        self.pace = Pace(model)
        self.step = 0  # steps done
        self.saved: int | None = None  # step of the last checkpoint
        self.tokens = 0
        self.left = False  # whether an evaluation was

    def run(self) -> None:
        steps, workers = self.config.training.steps, self.config.data.workers
        self._resume()
        if self.config.training.utilization:
            self.pace = Pace(self.model, measured_ceiling(self.model))
        write_run_info(self.out, self.config, self.model, self.data, self.pace.ceiling)
        subject = subject_of(self.config, self.model, self.data.corpus)
        statistics = StatisticsLog(self.out / STATISTICS, self.step, subject)
        started, title = time.monotonic(), f"train {self.out.name}"
        wanted = self.config.training.trackers
        ahead = batches_ahead(self.data.batches, range(self.step, steps), workers)
        with (
            StopSignals() as stop,
            tracking(wanted, self.out, self.step, self.config.plain()) as trackers,
            Metrics(self.out / METRICS, self.step, trackers) as metrics,
            self.writer,
            progress(title, steps, done=self.step) as report,
            contextlib.closing(ahead) as batches,
        ):
            if self._evaluation_due() and not metrics.kept_at(self.step, HELD_OUT):
                self._evaluate(metrics, stop)
            while self.step < steps and stop.number is None:
                figures = self._train_step(batches)
                self._keep_up()
                with self.pace.logging():
                    metrics.write(self.step, **figures, seconds=time.monotonic() - started)
                    speed = f"{figures['tokens_per_second']:,.0f} tokens/s"
                    report(1, f"loss {figures['loss']:.3f}, {speed}")
                if due(self.config.training.memory_statistics_every, self.step):
                    statistics.write(self.step)
                if self._evaluation_due():
                    self._evaluate(metrics, stop)
                if self._save_due():
                    self._save(metrics)
            if self.saved != self.step:  # a signal came
                self._save(metrics)
        if stop.number is not None and (self.step < steps or self.left):
            raise Interrupted(stop.number, self.step)

    def _train_step(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Train on the next batch; returns the figures of the step."""
        settings, watch, began = self.config.training, Stopwatch(), time.perf_counter()
        settings.recipe.set_step(self.optimizer, self.step, settings.steps, settings.warmup_steps)
        self.optimizer.zero_grad(set_to_none=True)
        with watch("data_seconds"):
            batch = next(batches)
            parts = batch.parts(settings.accumulation)
            parts, targets = [part.to(self.model.device) for part in parts], batch.targets
        positions = PositionLosses() if due(settings.position_loss_every, self.step + 1) else None
        loss = 0.0
        for part in parts:  # each leaves its share of the gradient in the parameters
            with watch("forward_seconds"):
                share = self._loss(part, targets, positions)
                loss += share.item()
            with watch("backward_seconds"):
                share.backward()
        with watch("backward_seconds"):
            gradients, norm = self._gradients()
        with watch("optimizer_seconds"):
            if settings.recipe.clip is not None:
                clip(gradients.values(), settings.recipe.clip, norm)
            self.optimizer.step()
            gradient_norm = norm.item()
        self.step += 1
        self.tokens += batch.input_ids.numel()
        seconds = time.perf_counter() - began
        return {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            "tokens_per_second": batch.input_ids.numel() / seconds,
            **watch.seconds,
            **self.pace.figures(batch.input_ids, seconds, watch.seconds),
            **({} if positions is None else positions.means()),
        }

    def _loss(self, batch: Batch, targets: int, positions: PositionLosses | None) -> Tensor:
        loss = language_loss(self.model, batch, targets, positions)
        if not is_finite(loss):
            again = functools.partial(language_loss, self.model, batch, targets)
            raise NonFiniteError(
                f"the loss is {loss.item()} at step {self.step + 1}, first in "
                f"{locate_non_finite(self.model, again)}"
            )
        return loss

    def _gradients(self) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients by parameter, and their norm."""
        gradients = numbers_of(self.model)
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not is_finite(norm):
            broken = non_finite_names(gradients.items())
            where = f"first in {broken[-1]}" if broken else "for their squares overflow"
            raise NonFiniteError(f"a gradient is not finite at step {self.step + 1}, {where}")
        return gradients, norm

    def _keep_up(self) -> None:
        """Hear of the last checkpoint; wait for it where a kill would cost more than it may."""
        if self.saved is not None and self.step >= self.saved + self.config.training.write_behind:
            self.writer.wait()
        self.writer.check()

    def _save_due(self) -> bool:
        settings = self.config.training
        every = (settings.checkpoint_every, settings.keep_every)
        return self.step == settings.steps or any(due(n, self.step) for n in every)

    def _save(self, metrics: Metrics) -> None:
        broken = non_finite_names(self.model.named_parameters())
        if broken:
            raise NonFiniteError(f"{broken[0]} is not finite after step {self.step}; not saved")
        metrics.sync()  # no checkpoint without the lines of its steps
        corpus = self.data.corpus
        taken = snapshot(
            self.model,
            self.optimizer,
            None if corpus is None else corpus.tokenizer,
            step=self.step,
            tokens=self.tokens,
            facts=self.facts,
        )
        self.writer.save(taken)
        self.saved = self.step

    def _evaluation_due(self) -> bool:
        settings = self.config.training
        if self.data.corpus is None or not self.step:
            return False
        return self.step == settings.steps or due(settings.evaluate_every, self.step)

    def _evaluate(self, metrics: Metrics, stop: StopSignals) -> None:
        """Write down bits per byte of held-out text; when a signal comes, it is left for later."""

        def leave(*_: object) -> None:
            if stop.number is not None:
                raise _Left

        subject = subject_of(self.config, self.model, self.data.corpus)
        held_out = BitsPerByte(max_tokens=self.config.training.evaluation_tokens)
        handle = self.model.register_forward_pre_hook(leave)
        try:
            bpb = run_evaluation(held_out, subject).results["bpb"]
        except _Left:
            self.left = True
            return
        finally:
            handle.remove()
            self.model.train()
        if not math.isfinite(bpb):
            raise NonFiniteError(f"the held-out loss is {bpb} after step {self.step}")
        metrics.write(self.step, **{HELD_OUT: bpb})

    def _resume(self) -> None:
        """Take up the newest checkpoint that is whole; says which ones are not."""
        problem = None
        for path in reversed(checkpoints(self.out)):
            try:
                saved = load_checkpoint(path, self.model, self.optimizer)
            except ValueError as error:
                problem = problem or error
                print(f"warning: {error}; trying the one before", file=sys.stderr)
                continue
            self.step, self.tokens, self.saved = saved["step"], saved["tokens"], saved["step"]
            return
        if problem is not None:
            raise problem


def language_loss(
    model: MeanbankForCausalLM,
    batch: Batch,
    targets: int,
    positions: PositionLosses | None = None,
) -> Tensor:
    """Cross-entropy in nats, summed over what is not ignored and divided by `targets`.

    With the batch's own number of targets it is their mean; with that of a larger batch, the part
    of its mean that these rows are. positions: takes the losses by position, too.
    """
    logits = model(
        input_ids=batch.input_ids, document_ids=batch.document_ids, use_cache=False
    ).logits
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    if positions is not None:
        positions.add(logits, batch)
    total = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / targets
