"""The CORE metric of DCLM, as an evaluation."""

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from meanbank.core.config import check_least
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, prompt_hash
from meanbank.evaluation.continuations import Judgement, fitted, judge, most_tokens
from meanbank.evaluation.core_tasks.folder import STANDARD, Task, read_tasks
from meanbank.evaluation.core_tasks.kinds import Item

# nanochat's, so that the default takes its order of items and its few-shot examples.
_ORDER_SEED, _EXAMPLES_SEED = 1337, 1234

RULES = {
    "mean": "the option with the lowest mean loss of its tokens: DCLM's (LLM-Foundry's lowest "
    "perplexity) and nanochat's",
    "sum": "the option with the lowest summed loss, not normalised by length: lm_eval's acc",
}
SETS = {
    "folder": "the folder's own eval_meta_data.csv",
    "dclm": "DCLM's since they were corrected: chance, the largest class for boolq (.62) and "
    "commonsense_qa (.403)",
    "nanochat": "DCLM's before that, which nanochat keeps: as chance, but boolq .62, "
    "commonsense_qa .2, agi_eval_lsat_ar .2, bigbench_language_identification .091",
    "chance": "uniform chance everywhere",
}

PROMPTS = "as nanochat's: a blank line between examples, all tokenized as one text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core(Evaluation, tag="core"):
    """Accuracy on the CORE tasks (Li et al. 2024, arXiv 2406.11794), centred and averaged.

    folder: in DCLM's layout, see `read_specs`. tasks: default all whose files are there. count: at
    most that many items a task, default all. seed: chooses them and the few-shot examples, which
    never hold the item itself; 0 takes those that nanochat takes of whole tasks. batch_size: inputs
    read at once; no score of a model of ours depends on it.

    Centred accuracy is (accuracy - baseline) / (1 - baseline); CORE is its mean over tasks. Options
    are compared by two `RULES`, and centred with each set of baselines in `SETS`; the score `core`
    is by the mean rule with the folder's own baselines, or DCLM's where it has none.
    """

    folder: str
    tasks: tuple[str, ...] | None = None
    count: int | None = None
    seed: int = 0
    batch_size: int = 8

    def __post_init__(self) -> None:
        check_least(self, 1, "count", "batch_size")
        if self.tasks == ():
            raise ValueError("tasks names no task; leave it out for all")

    @functools.cached_property
    def loaded(self) -> dict[str, Task]:
        return read_tasks(Path(self.folder).expanduser(), self.tasks)

    @property
    def batch(self) -> int:
        return self.batch_size

    def samples(self, subject: Subject) -> Sequence[Sample]:
        subject.text_tokenizer()
        return [
            Sample(id=f"{name}/{order[place]}", content=(task, place, order), group=name)
            for name, task in self.loaded.items()
            for order in [self._order(task)]
            for place in range(min(self.count or len(order), len(order)))
        ]

    def _order(self, task: Task) -> list[int]:
        order = list(range(len(task.items)))
        random.Random(_ORDER_SEED + self.seed).shuffle(order)
        return order

    def _examples(self, task: Task, place: int, order: Sequence[int]) -> list[Item]:
        others = range(len(order) - 1)  # the item itself left out, later ones move up
        chosen = random.Random(_EXAMPLES_SEED + self.seed + place).sample(others, task.spec.fewshot)
        return [task.items[order[other + (other >= place)]] for other in chosen]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        most, keep = most_tokens(subject.model), len(subject.prefix)
        rows, cut = [], []
        for sample in samples:
            task, place, order = sample.content
            made = task.kind.rows(
                subject.encode,
                task.items[order[place]],
                self._examples(task, place, order),
                task.spec.delimiter,
            )
            fit = [fitted(row, most, keep) for row in made]
            rows.append([row for row, _ in fit])
            cut.append(max(tokens for _, tokens in fit))
        flat = judge(subject.model, [row for of in rows for row in of], batch_size=self.batch_size)
        judged = iter(flat)
        records = []
        for sample, of, tokens in zip(samples, rows, cut, strict=True):
            record = self._record(sample, [next(judged) for _ in of], tokens)
            prompts = " ".join(prompt_hash(row.ids) for row in of)
            records.append({"prompt": prompt_hash(prompts), **record})
        return records

    def _record(self, sample: Sample, judged: list[Judgement], cut: int) -> Record:
        task, place, order = sample.content
        item, name = task.items[order[place]], task.spec.name
        if task.kind.options is None:
            right = dict.fromkeys(RULES, judged[0].greedy)
        else:
            values = {
                "mean": [option.loss / option.tokens for option in judged],
                "sum": [option.loss for option in judged],
            }
            right = {rule: _lowest(of) == item["gold"] for rule, of in values.items()}
        return {
            "task": name,
            "item": order[place],
            "right": right,
            "losses": [option.loss for option in judged],
            "tokens": [option.tokens for option in judged],
            "cut": cut,
            "scores": {
                f"{self.title}:{name}": float(right["mean"]),
                f"{self.title}.sum:{name}": float(right["sum"]),
            },
        }

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        rows = [
            self._row(task, [record for record in records if record["task"] == name])
            for name, task in self.loaded.items()
        ]
        sets = [name for name in SETS if all(name in t.baselines for t in self.loaded.values())]
        core = {rule: {name: self._core(rows, rule, name) for name in sets} for rule in RULES}
        inside = [name for name in self.loaded if name in STANDARD]
        return {
            "core": {rule: fmean([row[f"centred_{rule}"] for row in rows]) for rule in RULES},
            "core_by_baselines": core,
            "covered": f"{len(inside)} of {len(STANDARD)}",
            "missing": [name for name in STANDARD if name not in inside],
            "beside": [name for name in self.loaded if name not in STANDARD],
            "tasks": rows,
            "rules": RULES,
            "baselines": {name: SETS[name] for name in sets},
            "prompts": PROMPTS,
            "cut_items": sum(row["cut_items"] for row in rows),
            "most_tokens": most_tokens(subject.model),
            **self.inputs(),
        }

    def inputs(self) -> dict[str, Any]:
        return {"sha256": {name: task.sha256 for name, task in self.loaded.items()}}

    def _core(self, rows: Sequence[dict[str, Any]], rule: str, baselines: str) -> float:
        tasks = zip(rows, self.loaded.values(), strict=True)
        return fmean([_centred(r[f"accuracy_{rule}"], t.baselines[baselines]) for r, t in tasks])

    def _row(self, task: Task, records: Sequence[Record]) -> dict[str, Any]:
        baseline_from, baseline = next(iter(task.baselines.items()))
        accuracy = {rule: fmean([record["right"][rule] for record in records]) for rule in RULES}
        return {
            "task": task.spec.name,
            "type": task.spec.kind,
            "fewshot": task.spec.fewshot,
            "items": len(records),
            "baseline": baseline,
            "baseline_from": baseline_from,
            **{f"accuracy_{rule}": value for rule, value in accuracy.items()},
            **{f"centred_{rule}": _centred(value, baseline) for rule, value in accuracy.items()},
            "cut_items": sum(record["cut"] > 0 for record in records),
        }

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        title = self.title
        by_set = results["core_by_baselines"]["mean"]
        return {
            title: results["core"]["mean"],
            f"{title}.sum": results["core"]["sum"],
            **{f"{title}.{name}": value for name, value in by_set.items()},
            **{f"{title}:{row['task']}": row["accuracy_mean"] for row in results["tasks"]},
            **{f"{title}.sum:{row['task']}": row["accuracy_sum"] for row in results["tasks"]},
        }


def _lowest(losses: Sequence[float]) -> int | None:
    """The first of the lowest; None where a diverged model gives losses that are no numbers."""
    return None if any(map(math.isnan, losses)) else losses.index(min(losses))


def _centred(accuracy: float, baseline: float) -> float:
    return (accuracy - baseline) / (1 - baseline)
