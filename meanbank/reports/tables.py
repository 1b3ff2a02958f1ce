"""The tables of a demo as text cells, the same for the terminal and for the page."""

from collections.abc import Iterable
from dataclasses import dataclass

from meanbank.reports.results import DemoResults, LanguageArm, RecallArm, RecallRun
from meanbank.reports.wording import (
    binary_size,
    decimal,
    grouped,
    length,
    listed,
    rate,
    short_count,
    signed,
)

MULTIPLES = (1, 2, 4, 8)
MEMORY_CONTEXTS = (32 * 2**10, 2**20)
DECODE_CONTEXT = 8 * 2**10
# Where a fixed memory is far beyond its capacity and a growing one is not.
CONTRAST = (512, 48)
CHANCE = 1 / 32


@dataclass(frozen=True, kw_only=True)
class Row:
    """Cells of one line; `emphasis` for a mean among the seeds that it is made of.

    Lines of a cell after its first one are details. tone: "good", "bad", "open" or "" for the
    colour of a verdict in the second cell, whose words say it too.
    """

    cells: tuple[str, ...]
    emphasis: bool = False
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with what it means in plain words; the first `text_columns` hold words.

    Headings may be broken at their line breaks.
    """

    title: str
    meaning: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    text_columns: int = 1


def language_table(results: DemoResults) -> Table:
    """One row a language model, and the bigram baseline."""
    columns = (
        "Model",
        "Params",
        "BPB",
        *(f"Loss\n{multiple}×" for multiple in MULTIPLES),
        *(f"Memory\n{length(context)}" for context in MEMORY_CONTEXTS),
        "Decode\ntok/s",
    )
    rows = [Row(cells=_language_cells(arm)) for arm in results.language]
    bits_per_byte = results.bigram.bits_per_byte if results.bigram else None
    missing = (decimal(None),) * (len(columns) - 3)
    rows.append(Row(cells=("Bigram baseline", decimal(None), decimal(bits_per_byte), *missing)))
    return Table(
        title="Language models on real text",
        meaning=_language_meaning(results),
        columns=columns,
        rows=tuple(rows),
    )


def _language_cells(arm: LanguageArm) -> tuple[str, ...]:
    at = arm.position_loss.at if arm.position_loss else {}
    losses = (at[multiple].loss if multiple in at else None for multiple in MULTIPLES)
    bytes_at = arm.memory.bytes_at if arm.memory else {}
    return (
        arm.label,
        short_count(arm.run.parameters if arm.run else None),
        decimal(arm.bits_per_byte),
        *(decimal(loss) for loss in losses),
        *(binary_size(bytes_at.get(context)) for context in MEMORY_CONTEXTS),
        _decode_cell(arm),
    )


def _decode_cell(arm: LanguageArm) -> str:
    speed = arm.decode_speed
    if speed is None:
        return rate(None)
    elsewhere = speed.context is not None and speed.context != DECODE_CONTEXT
    where = f" (at {length(speed.context or 0)})" if elsewhere else ""
    return rate(speed.tokens_per_second) + where


def _language_meaning(results: DemoResults) -> tuple[str, ...]:
    return (
        f"Each row is one model; the models differ in how they remember and where their values "
        f"come from. {_training_in_common(results)}",
        "BPB: the bits that a model needs for one byte of text that it has not seen; lower is "
        "better. The bigram baseline predicts each token from the one before it alone.",
        _position_meaning(results),
        f"Memory: the state of one sequence after {length(MEMORY_CONTEXTS[0])} and "
        f"{length(MEMORY_CONTEXTS[1])} tokens.{_tables_meaning(results)} Decode: tokens generated "
        f"a second, one sequence, with {length(DECODE_CONTEXT)} tokens already read.",
    )


def _training_in_common(results: DemoResults) -> str:
    runs = [arm.run for arm in results.language if arm.run]
    if not runs:
        return "None of them has been trained yet."
    alike = {(run.sequence_length, run.steps, run.tokens, run.seed, str(run.data)) for run in runs}
    if len(alike) > 1:
        return "They were NOT all trained on the same data for the same number of tokens."
    tokens = short_count(runs[0].tokens)
    return f"All were trained on the same data, {tokens} tokens in sequences of " + (
        f"{grouped(runs[0].sequence_length)}, from the same seed."
    )


def _position_meaning(results: DemoResults) -> str:
    found = [arm.position_loss for arm in results.language if arm.position_loss]
    trained = {loss.training_length for loss in found if loss.training_length is not None}
    documents = {loss.documents for loss in found if loss.documents is not None}
    errors = [
        bucket.standard_error
        for loss in found
        for bucket in loss.at.values()
        if bucket.standard_error is not None
    ]
    length_said = f" of {_listed_counts(trained)} tokens" if trained else ""
    on = f", on {_listed_counts(documents)} long held-out documents" if documents else ""
    text = (
        "Loss k×: nats a token, averaged over positions from half of k to k times the training "
        f"length{length_said}{on}. A model whose row does not rise goes on working beyond the "
        "length that it was trained on."
    )
    if errors:
        text += (
            f" Standard errors over documents are up to {decimal(max(errors))}; the models read "
            "the same documents, so their differences are surer than that."
        )
    return text


def _listed_counts(counts: set[int]) -> str:
    return listed([grouped(count) for count in sorted(counts)])


def _tables_meaning(results: DemoResults) -> str:
    sizes = {
        arm.label: arm.memory.table_bytes
        for arm in results.language
        if arm.memory and arm.memory.table_bytes
    }
    if not sizes:
        return ""
    parts = [f"{label}, {binary_size(size)}" for label, size in sizes.items()]
    return (
        " The tables of a bank are parameters, held once for all sequences, and not counted here "
        f"({'; '.join(parts)})."
    )


def recall_table(results: DemoResults) -> Table:
    """Accuracy by length and pairs: each seed of each model, then the model's mean."""
    settings = results.recall_settings or [CONTRAST]
    rows = [row for arm in results.recall for row in _recall_rows(arm, settings)]
    return Table(
        title="Associative recall",
        meaning=_recall_meaning(results),
        columns=("Model", "Seed", *(f"{tokens}/{pairs}" for tokens, pairs in settings)),
        rows=tuple(rows),
        text_columns=2,
    )


def _recall_rows(arm: RecallArm, settings: list[tuple[int, int]]) -> Iterable[Row]:
    for run in arm.runs:
        accuracy = (decimal(run.accuracy.get(setting)) for setting in settings)
        yield Row(cells=(arm.label, str(run.seed), *accuracy))
    means = (decimal(arm.mean(setting)) for setting in settings)
    yield Row(cells=(arm.label, "mean", *means), emphasis=True)


def _recall_meaning(results: DemoResults) -> tuple[str, ...]:
    lines = [
        "A sequence shows pairs of a key and a value among filler and then asks for the values of "
        "some keys. Columns are the tokens of a sequence / the pairs in it; cells are the share "
        f"of right answers. Guessing among the 32 values gives 1/32 = {decimal(CHANCE)}."
    ]
    asked = {count for arm in results.recall for run in arm.runs for count in run.queries.values()}
    if asked:
        fewest, most = grouped(min(asked)), grouped(max(asked))
        spread = fewest if fewest == most else f"{fewest} to {most}"
        lines.append(f"Each cell of a seed is over {spread} questions.")
    return tuple(lines)


def contrast_table(results: DemoResults) -> Table:
    """What a growing memory gains over a fixed one, seed by seed."""
    arms = {arm.name: arm for arm in results.recall}
    growing, fixed = arms["kvm_sqrt"], arms["kvm_fixed"]
    rows = []
    for seed in results.recall_seeds:
        pair = [_accuracy(arm.runs, seed) for arm in (growing, fixed)]
        rows.append(_contrast_row(str(seed), *pair))
    complete = [
        (high, low)
        for seed in results.recall_seeds
        if (high := _accuracy(growing.runs, seed)) is not None
        and (low := _accuracy(fixed.runs, seed)) is not None
    ]
    if complete:
        means = [sum(column) / len(complete) for column in zip(*complete, strict=True)]
        rows.append(_contrast_row("mean", *means, emphasis=True))
    else:
        rows.append(_contrast_row("mean", None, None, emphasis=True))
    tokens, pairs = CONTRAST
    return Table(
        title=f"What growing buys: recall at {tokens}/{pairs}",
        meaning=(
            f"Accuracy in sequences of {tokens} tokens with {pairs} pairs, more than a fixed "
            "memory has rows for. The difference is taken seed by seed.",
        ),
        columns=("Seed", growing.label, fixed.label, "Difference"),
        rows=tuple(rows),
    )


def _accuracy(runs: tuple[RecallRun, ...], seed: int) -> float | None:
    return next((run.accuracy.get(CONTRAST) for run in runs if run.seed == seed), None)


def _contrast_row(
    seed: str, growing: float | None, fixed: float | None, *, emphasis: bool = False
) -> Row:
    difference = None if growing is None or fixed is None else growing - fixed
    return Row(
        cells=(seed, decimal(growing), decimal(fixed), signed(difference)), emphasis=emphasis
    )
