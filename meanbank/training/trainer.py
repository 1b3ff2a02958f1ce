"""The training loop."""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanbank.core.errors import one_line
from meanbank.core.progress import progress
from meanbank.data import Batch
from meanbank.data.ahead import Share, batches_ahead
from meanbank.evaluation import BitsPerByte, Subject, run_evaluation
from meanbank.model import MeanbankForCausalLM
from meanbank.training.checkpoint import checkpoints, kept, left, load_checkpoint, snapshot
from meanbank.training.config import RunConfig, due
from meanbank.training.finite import (
    NonFiniteError,
    is_finite,
    locate_non_finite,
    non_finite_names,
)
from meanbank.training.gradients import clip, norm_of, numbers_of
from meanbank.training.metrics import Metrics, NoMetrics, Stopwatch
from meanbank.training.pace import Pace, measured_ceiling
from meanbank.training.parallel import arranged
from meanbank.training.positions import PositionLosses
from meanbank.training.ranks import Ranks, together
from meanbank.training.run import (
    METRICS,
    STATISTICS,
    TrainingData,
    choose_device,
    config_hash,
    subject_of,
    write_run_info,
)
from meanbank.training.sharding import here
from meanbank.training.signals import PATIENCE, Interrupted, StopSignals
from meanbank.training.start import (
    check_ranks,
    checked_data,
    prepared_run,
    warn_of_idle_memories,
)
from meanbank.training.statistics import StatisticsLog
from meanbank.training.trackers import Trackers, check_trackers, tracking
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
    with together() as ranks:
        device = ranks.connect(choose_device(config.training.device))
        check_ranks(config, ranks)
        check_trackers(config.training.trackers)
        data = ranks.in_turn(
            functools.partial(checked_data, config, Path(out), ranks, resume, force)
        )
        torch.manual_seed(config.training.seed)
        model = MeanbankForCausalLM(config.model_config(data.vocab_size, data.end_of_text_id))
        if data.corpus is not None:  # padding of the vocabulary stands for no text
            padding = range(data.corpus.vocab_size, data.vocab_size)
            model.generation_config.suppress_tokens = list(padding) or None
        model.to(device)  # pyright: ignore[reportArgumentType]
        model.train()
        with contextlib.ExitStack() as held:
            if ranks.leads:
                warn_of_idle_memories(model, config)
                held.enter_context(prepared_run(config, Path(out), resume, force))
            held.enter_context(ranks.watched())
            ranks.told()  # the folder is there
            Trainer(config, Path(out), model, data, ranks).run()
    return Path(out)


class Trainer:
    """One run, or one rank's part of it: the loop and what rank 0 writes."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        model: MeanbankForCausalLM,
        data: TrainingData,
        ranks: Ranks,
    ) -> None:
        self.config, self.out, self.model, self.data, self.ranks = config, out, model, data, ranks
        settings = config.training
        self.parallel = arranged(model, settings, ranks)
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
        self.signal: int | None = None  # that ends the run

    def run(self) -> None:
        steps, workers = self.config.training.steps, self.config.data.workers
        self._resume()
        if self.config.training.utilization:
            self.pace = Pace(self.model, measured_ceiling(self.model, self.products))
        statistics = StatisticsLog(self._subject(), self.parallel)
        if self.ranks.leads:
            write_run_info(self.out, self.config, self.model, self.data, self.pace.ceiling)
            statistics.begin(self.out / STATISTICS, self.step)
        started, title = time.monotonic(), f"train {self.out.name}"
        share = Share(self.data.batches, self.ranks.rank, self.ranks.size)
        if self.config.training.compile and self.step < steps:
            self._try_compiled(share.batch(self.step))
        ahead = batches_ahead(share, range(self.step, steps), workers)
        with (
            StopSignals(patience=0.0 if self.ranks.alone else PATIENCE) as stop,
            self.ranks.watched(),  # signals wait until it is clear who is lost
            self._trackers() as trackers,
            self._metrics(trackers) as metrics,
            self.writer,
            progress(title, steps, done=self.step) as report,
            contextlib.closing(ahead) as batches,
        ):
            evaluated, *_ = self.ranks.gathered(metrics.kept_at(self.step, HELD_OUT))
            if self._evaluation_due() and not evaluated:
                self._evaluate(metrics, stop)
            while self.step < steps and not self._stops(stop):
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
            self.writer.wait()
            self.ranks.meet()  # or none is done
        if self.signal is not None and (self.step < steps or self.left):
            raise Interrupted(self.signal, self.step)

    def _try_compiled(self, batch: Batch) -> None:
        """Compile with the passes of a step; ValueError where the model, or the machine, cannot."""
        part = batch.parts(self.config.training.accumulation)[0].to(self.model.device)
        try:
            with self.ranks.watched(), self.parallel.part(last=True):
                self._loss(part, max(1, part.targets))[0].backward()
                self.parallel.reduce()
        except RuntimeError as error:  # all of its errors are
            raise ValueError(
                f"the model does not compile here ({one_line(error)[:200]}): set "
                "training.compile=false"
            ) from error
        self.optimizer.zero_grad(set_to_none=True)

    def _trackers(self) -> contextlib.AbstractContextManager[Trackers]:
        wanted = self.config.training.trackers if self.ranks.leads else ()
        return tracking(wanted, self.out, self.step, self.config.plain())

    def _metrics(self, trackers: Trackers) -> Metrics:
        if not self.ranks.leads:
            return NoMetrics()
        return Metrics(self.out / METRICS, self.step, trackers)

    def _stops(self, stop: StopSignals) -> bool:
        """Whether a signal has come to any rank: all end after the same step."""
        (number,) = self.ranks.largest(stop.number or 0)
        self.signal = int(number) or None
        return self.signal is not None

    def _train_step(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Train on the next batch; returns the figures of the step."""
        settings, watch, began = self.config.training, Stopwatch(), time.perf_counter()
        settings.recipe.set_step(self.optimizer, self.step, settings.steps, settings.warmup_steps)
        self.optimizer.zero_grad(set_to_none=True)
        with watch("data_seconds"):
            batch = next(batches)
            parts = [part.to(self.model.device) for part in batch.parts(settings.accumulation)]
            sizes = self.ranks.sum(batch.targets, batch.input_ids.numel())
            targets, tokens = map(int, sizes)
        positions = PositionLosses() if due(settings.position_loss_every, self.step + 1) else None
        loss = 0.0
        for number, part in enumerate(parts, 1):
            with self.parallel.part(last=number == len(parts)):
                with watch("forward_seconds"):
                    share, summed = self._loss(part, targets, positions)
                    loss += summed
                with watch("backward_seconds"):  # each leaves its gradient in the parameters
                    share.backward()
        with watch("backward_seconds"):
            self.parallel.reduce()
            gradients, norm = self._gradients()
        with watch("optimizer_seconds"):
            if settings.recipe.clip is not None:
                clip(gradients.values(), settings.recipe.clip, norm)
            self.optimizer.step()
            gradient_norm = norm.item()
        self.step += 1
        self.tokens += tokens
        seconds = time.perf_counter() - began
        return {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            **watch.seconds,
            **self.pace.figures(batch.input_ids, seconds, watch.seconds),
            **({} if positions is None else positions.means(self.ranks.sum)),
        }

    @property
    def products(self) -> torch.dtype:
        """In which matrices are multiplied."""
        settings = self.config.training
        return torch.bfloat16 if settings.precision == "bfloat16" else self.model.dtype

    def _loss(
        self, batch: Batch, targets: int, positions: PositionLosses | None = None
    ) -> tuple[Tensor, float]:
        """The part of the loss that is this rank's, and that of all ranks."""
        lower = self.products != self.model.dtype
        with torch.autocast(self.model.device.type, self.products, enabled=lower):
            loss = language_loss(self.parallel.forward, batch, targets, positions)
            (summed,) = self.ranks.sum(loss.item())
            if not math.isfinite(summed):
                again = functools.partial(language_loss, self.model, batch, targets)
                raise NonFiniteError(self._told_loss(loss.item(), again))
        return loss, summed

    def _told_loss(self, loss: float, again: Callable[[], object]) -> str:
        """Which rank has a loss that is not finite, and what in the model made it so."""
        place = locate_non_finite(self.model, again)  # on all ranks: they may need each other
        found = self.ranks.gathered(None if math.isfinite(loss) else [str(loss), place])
        rank, (told, place) = next((r, each) for r, each in enumerate(found) if each)
        where = "" if self.ranks.alone else f" on rank {rank}"
        return f"the loss is {told} at step {self.step + 1}{where}, first in {place}"

    def _gradients(self) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients by parameter, as far as they are here, and the norm of all."""
        gradients = numbers_of(self.model)
        norm = norm_of(self.model, gradients, self.ranks)
        if not is_finite(norm):
            broken = self._broken(gradients)
            where = f"first in {broken[-1]}" if broken else "for their squares overflow"
            raise NonFiniteError(f"a gradient is not finite at step {self.step + 1}, {where}")
        return gradients, norm

    def _broken(self, tensors: dict[str, Tensor]) -> list[str]:
        """Names of those that are not finite on any rank, in the model's order."""
        broken = {
            n for each in self.ranks.gathered(non_finite_names(tensors.items())) for n in each
        }
        return [name for name, _ in self.model.named_parameters() if name in broken]

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
        broken = self._broken({n: here(p) for n, p in self.model.named_parameters()})
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
            keeps=kept if self.ranks.leads else left,
        )
        if self.ranks.leads:
            self.writer.save(taken)
        self.saved = self.step

    def _subject(self) -> Subject:
        return subject_of(self.config, self.model, self.data.corpus)

    def _evaluation_due(self) -> bool:
        settings = self.config.training
        if self.data.corpus is None or not self.step:
            return False
        return self.step == settings.steps or due(settings.evaluate_every, self.step)

    def _evaluate(self, metrics: Metrics, stop: StopSignals) -> None:
        """Write down bits per byte of held-out text; when a signal comes, it is left for later.

        Every rank reads all of it: where the model is divided, none can read anything alone.
        """

        def leave(*_: object) -> None:
            if self._stops(stop):
                raise _Left

        held_out = BitsPerByte(max_tokens=self.config.training.evaluation_tokens)
        handle = self.model.register_forward_pre_hook(leave, prepend=True)
        try:
            bpb = run_evaluation(held_out, self._subject()).results["bpb"]
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
        if not self.ranks.leads:
            newest = self.ranks.told()
            if newest is not None:
                self._take_up(self.out / newest)
            return
        problem = None
        for path in reversed(checkpoints(self.out)):
            try:
                self._take_up(path)
            except ValueError as error:
                problem = problem or error
                print(f"warning: {error}; trying the one before", file=sys.stderr)
                continue
            self.ranks.told(str(path.relative_to(self.out)))
            return
        if problem is not None:
            raise problem
        self.ranks.told()

    def _take_up(self, path: Path) -> None:
        saved = load_checkpoint(path, self.model, self.optimizer)
        self.step, self.tokens, self.saved = saved["step"], saved["tokens"], saved["step"]


def language_loss(
    model: Callable[..., Any],
    batch: Batch,
    targets: int,
    positions: PositionLosses | None = None,
) -> Tensor:
    """Cross-entropy in nats, summed over what is not ignored and divided by `targets`.

    With the batch's own number of targets it is their mean; with that of a larger batch, the part
    of its mean that these rows are. positions: takes the losses by position, too.
    """
    output = model(
        input_ids=batch.input_ids,
        document_ids=batch.document_ids,
        targets=batch.labels,
        use_cache=False,
    )
    if positions is not None:
        positions.add(output.losses, batch)
    return output.loss / targets
