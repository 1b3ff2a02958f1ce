"""`meanbank evaluate`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    task: str = "",
    max_tokens: int | None = None,
    max_documents: int | None = None,
    multiple: int | None = None,
    context: int = 8192,
    sequences: int = 256,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    bank_storage: Literal["resident", "mmap", "int8"] = "resident",
) -> int:
    """Evaluate a run; writes RUN/evaluations/TASK.json and prints a table.

    Args:
        run: the folder of a run.
        task: names, separated by commas, of: bpb (bits per byte of held-out text), position-loss
            (loss by token position), recall (accuracy by length and pairs), memory (bytes against
            context), decode-speed. Default: what fits the run, without decode-speed.
        max_tokens: bpb: at most that many held-out tokens, evenly spread. Default: all full
            windows.
        max_documents: position-loss: at most that many documents. Default: all long enough.
        multiple: position-loss: up to that many times the training length. Default: 8, or less
            where no held-out document is that long.
        context: decode-speed: tokens read before the timed ones.
        sequences: recall: sequences for each length and number of pairs.
        device: auto takes a GPU where there is one.
        bank_storage: where tables over token ids are: in memory, in the model's files, or in memory
            in int8. Results of the last two are in TASK-mmap.json and TASK-int8.json.
    """
    from meanbank.studies.evaluations import EvaluationSettings, evaluate_run
    from meanbank.training import load_run

    settings = EvaluationSettings(
        max_tokens=max_tokens,
        max_documents=max_documents,
        multiple=multiple,
        context=context,
        sequences=sequences,
    )
    loaded = load_run(run, device, bank_storage)
    tasks = [name.strip() for name in task.split(",") if name.strip()]
    for result in evaluate_run(loaded, tasks, settings):
        print_result(result)
    return 0


def print_result(result: dict[str, Any]) -> None:
    """A table of one result."""
    from rich.console import Console
    from rich.table import Table

    results = result["results"]
    rows = next((v for v in results.values() if isinstance(v, list)), None)
    if "at" in results:
        rows = [{"x training length": k, **row} for k, row in results["at"].items()]
    rows = rows or [{k: v for k, v in results.items() if not isinstance(v, (list, dict))}]
    table = Table(title=result["task"], title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
