"""`meanbank evaluate`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meanbank.cli.tables import plain


def evaluate(
    model: Annotated[str, tyro.conf.Positional],
    /,
    task: str = "",
    set: tuple[str, ...] = (),
    data: str | None = None,
    out: Path | None = None,
    records: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    bos: Literal["none", "always"] = "none",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    bank_storage: Literal["resident", "mmap", "int8"] = "resident",
) -> int:
    """Evaluate a run, or any causal language model; writes a JSON file a task and prints tables.

    An evaluation that was interrupted goes on where it was when the same command runs again.

    Args:
        model: the folder of a run, or a Hugging Face folder of any causal language model, or
            hf:NAME of the hub.
        task: names, separated by commas; an unknown one lists all. Default: what fits the model.
            bpb: bits per byte of held-out text. position-loss: loss by token position. recall:
            accuracy by length and pairs. memory: bytes against context. serving: tokens a second
            and bytes held. samples: text to look at.
        set: settings TASK.SETTING=VALUE, such as bpb.max_tokens=100000 recall.sequences=64.
        data: texts, a source as for training (data.source), in place of the run's own; the
            held-out documents of it are read.
        out: a folder for results. Default: RUN/evaluations, for other models
            runs/NAME/evaluations.
        records: keep the records of single samples in TASK.records.jsonl.
        bos: always puts the model's begin-of-text token before every text; for models that were
            trained with it.
        device: auto takes a GPU where there is one.
        bank_storage: where tables over token ids are: in memory, in the model's files, or in memory
            in int8. Results of the last two are in TASK-mmap.json and TASK-int8.json.
    """
    from meanbank.studies.evaluations import evaluate, fitting_tasks, open_evaluated, read_tasks

    names = [name.strip() for name in task.split(",") if name.strip()]
    tasks = read_tasks(names, set if names else ())  # whatever is wrong there is told at once
    found = open_evaluated(
        model, device=device, bank_storage=bank_storage, data=data, out=out, bos=bos
    )
    tasks = tasks or read_tasks(fitting_tasks(found.subject), set)
    for result in evaluate(found, tasks, keep_records=records):
        print_result(result)
    return 0


def print_result(result: dict[str, Any]) -> None:
    """A table of one result."""
    from rich.console import Console
    from rich.table import Table

    results = result["results"]
    rows = next((v for v in results.values() if isinstance(v, list) and v), None)
    if "at" in results:
        rows = [{"x training length": k, **row} for k, row in results["at"].items()]
    rows = rows or [{k: v for k, v in results.items() if not isinstance(v, (list, dict))}]
    table = Table(title=plain(result["name"]), title_justify="left")
    for name in rows[0]:
        table.add_column(plain(name.replace("_", " ")), justify="right")
    for row in rows:
        table.add_row(*(plain(_cell(value)) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
