"""`meanbank evaluate`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meanbank.cli.overrides import Overrides, listed
from meanbank.cli.tables import console, table


def evaluate(
    model: Annotated[str, tyro.conf.Positional],
    /,
    task: str = "",
    set: Overrides = (),
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
            On held-out text: bpb, bits per byte; bigram, those of counted pairs of tokens;
            position-loss, loss by token position; parts, what each part of the values is worth.
            On made-up tasks: recall and mqar, associative recall by length and pairs; ruler,
            thirteen tasks on long contexts. On data sets: core, the 21 tasks of DCLM; harness,
            tasks of lm_eval. Of the memory: memory, bytes against context; memory-statistics, how
            rows are used; position-probe, how much position stored keys tell; serving, tokens a
            second and bytes held. With other memories than in training: changed, which does another
            evaluation (changed.budget.type=fixed changed.evaluation.type=bpb). To look at: samples.
        set: settings TASK.SETTING=VALUE, such as bpb.max_tokens=100000 recall.sequences=64; takes
            several, and may be repeated.
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
    changes = listed(set)
    tasks = read_tasks(names, changes if names else ())  # whatever is wrong there is told at once
    found = open_evaluated(
        model, device=device, bank_storage=bank_storage, data=data, out=out, bos=bos
    )
    tasks = tasks or read_tasks(fitting_tasks(found.subject), changes)
    for result in evaluate(found, tasks, keep_records=records):
        print_result(result)
    return 0


def print_result(result: dict[str, Any]) -> None:
    """A table of one result, without what has parts of its own."""
    results = result["results"]
    rows = next((v for v in results.values() if isinstance(v, list) and v), None)
    if "at" in results:
        rows = [{"x training length": k, **row} for k, row in results["at"].items()]
    rows = rows or [{k: v for k, v in results.items() if not isinstance(v, (list, dict))}]
    costs = {cost["tokens"]: cost for cost in result["costs"]}
    rows = [_with_cost(row, costs) for row in rows]
    names = {k: None for row in rows for k, v in row.items() if not isinstance(v, (list, dict))}
    columns = [name.replace("_", " ") for name in names]
    cells = [tuple(row.get(name) for name in names) for row in rows]
    console().print(table(result["name"], columns, cells))


def _with_cost(row: dict[str, Any], costs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A row about a length with what a context of it costs beside."""
    cost = costs.get(row.get("length") or row.get("stop") or 0)
    if cost is None:
        return row
    return {**row, "bytes held": cost["bytes"], "tokens/s": cost["prefill_tokens_per_second"]}
