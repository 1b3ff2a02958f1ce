"""A study's folder as a finished study leaves it, with made-up numbers of a realistic shape."""

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

SEEDS = (11, 12, 13)
TUNING_SEED = 7
LENGTH = 512
PRODUCED_BY = {
    "version": "0.1.0",
    "commit": "0123abc",
    "python": "3.11.7",
    "torch": "2.13.0",
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
}
GROUPS: dict[str, dict[str, Any]] = {
    "recall": {
        "label": "Recall beyond capacity",
        "match": "parameters",
        "arms": {
            "full": "Full attention",
            "kvm_fixed": "KVM, 8 rows",
            "kvm_sqrt": "KVM, 4·sqrt(N) rows",
            "no_gate": "KVM, 4·sqrt(N) rows, no gate",
            "ovq": "OVQ, 64 centroids",
        },
    },
    "needle": {
        "label": "Long-context retrieval",
        "match": None,
        "arms": {
            "needle_full": "Full attention, half rotary",
            "needle_window": "Sliding window",
            "needle_kvm": "KVM, 8·sqrt(N) rows",
        },
    },
    "bank": {
        "label": "Values from a bank",
        "match": "tokens",
        "arms": {
            "bank_standard": "Standard attention",
            "bank_bank": "Bank of values, every second layer",
            "bank_mixed": "Projected + bank, mixed",
            "bank_first": "First layer's values, mixed",
        },
    },
}
SETTINGS = ((128, 12), (512, 12), (1024, 12), (128, 24), (512, 48))
ACCURACY = {
    "full": (1.0, 0.996, 0.852, 1.0, 0.997),
    "kvm_fixed": (0.761, 0.725, 0.686, 0.606, 0.354),
    "kvm_sqrt": (0.990, 0.979, 0.931, 0.965, 0.910),
    "no_gate": (0.51, 0.46, 0.41, 0.37, 0.22),
    "ovq": (0.93, 0.88, 0.79, 0.84, 0.55),
}
CLAIMS = [
    {
        "claim": "growing-rescues-recall",
        "says": "A growing memory recalls more than a fixed one beyond its capacity (512 tokens, "
        "48 pairs).",
        "source": "KVM, table 3",
        "expected": "holds",
        "verdict": "holds",
        "mean": 0.556,
        "interval": {"low": 0.51, "high": 0.602, "kind": "t over seeds, 95 %"},
        "bootstrap": {"low": 0.53, "high": 0.58, "kind": "items"},
        "p": 0.0004,
        "p_holm": 0.0016,
        "threshold": 0.3,
        "direction": ">=",
        "seeds": list(SEEDS),
        "values": {"11": 0.54, "12": 0.556, "13": 0.572},
        "tuning_values": {"7": 0.61},
        "notes": [],
    },
    {
        "claim": "bank-beats-standard",
        "says": "At equal tokens a bank has lower bits per byte than standard attention.",
        "source": "Bank of Values, figure 2",
        "expected": "holds",
        "verdict": "suggestive: holds",
        "mean": -0.0061,
        "interval": {"low": -0.0127, "high": 0.0005, "kind": "t over seeds, 95 %"},
        "bootstrap": None,
        "p": 0.061,
        "p_holm": 0.183,
        "threshold": -0.004,
        "direction": "<=",
        "seeds": list(SEEDS),
        "values": {"11": -0.0031, "12": -0.0066, "13": -0.0086},
        "tuning_values": {},
        "notes": ["Added after results existed."],
    },
    {
        "claim": "gate-matters",
        "says": "Without the merge gate recall falls by no more than a tenth.",
        "source": "KVM, section 4.2",
        "expected": "",
        "verdict": "does not hold",
        "mean": -0.48,
        "interval": {"low": -0.53, "high": -0.43, "kind": "t over seeds, 95 %"},
        "bootstrap": {"low": -0.51, "high": -0.46, "kind": "items"},
        "p": 0.00002,
        "p_holm": 0.0001,
        "threshold": -0.1,
        "direction": ">=",
        "seeds": list(SEEDS),
        "values": {"11": -0.46, "12": -0.48, "13": -0.5},
        "tuning_values": {},
        "notes": [],
    },
    {
        "claim": "needle-at-8x",
        "says": "KVM finds a needle at eight times the training length where full attention does "
        "not.",
        "source": "ours",
        "expected": "holds",
        "verdict": "undecided",
        "mean": 0.12,
        "interval": {"low": -0.2, "high": 0.44, "kind": "t over seeds, 95 %"},
        "bootstrap": {"low": -0.02, "high": 0.25, "kind": "items"},
        "p": 0.24,
        "p_holm": 0.48,
        "threshold": 0.1,
        "direction": ">=",
        "seeds": list(SEEDS),
        "values": {"11": -0.02, "12": 0.13, "13": 0.25},
        "tuning_values": {},
        "notes": [],
    },
    {
        "claim": "bank-at-16m",
        "says": "The lead of the bank stays at sixteen million tokens.",
        "source": "Bank of Values, figure 4",
        "expected": "holds",
        "verdict": "not measured",
        "mean": None,
        "interval": None,
        "bootstrap": None,
        "p": None,
        "p_holm": None,
        "threshold": -0.004,
        "direction": "<=",
        "seeds": [],
        "values": {},
        "tuning_values": {},
        "notes": ["No run has so many tokens."],
    },
]


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_study(
    folder: Path,
    groups: dict[str, dict[str, Any]] | None = None,
    evaluations: tuple[str, ...] | None = None,
) -> Path:
    """A study, of these groups and evaluations where they are given, else of all.

    One run failed (`no_gate`, last seed) and one was not done (`bank_first`, last seed).
    """
    groups = GROUPS if groups is None else groups
    plan = {
        "title": "Small study of memories and banks",
        "description": "Small models that differ in two choices: how attention remembers the past, "
        "and where its values come from.",
        "seeds": list(SEEDS),
        "tuning_seeds": [TUNING_SEED],
        "groups": {
            name: {
                "label": group["label"],
                "match": group["match"],
                "arms": {
                    arm: {"config_name": f"quick/{arm}", "label": label}
                    for arm, label in group["arms"].items()
                },
                "evaluations": [],
            }
            for name, group in groups.items()
        },
    }
    write_json(folder / "study.yaml", plan)  # JSON is YAML
    rule = "A claim holds when the 95 % interval of its mean over seeds lies beyond the threshold."
    compared = [one for name, group in groups.items() for one in comparisons(name, group["arms"])]
    verdicts = {"rule": rule, "claims": CLAIMS, "comparisons": compared}
    write_json(folder / "verdicts.json", verdicts)
    lines = []
    for name, group in groups.items():
        for arm in group["arms"]:
            for seed in (TUNING_SEED, *SEEDS):
                if (arm, seed) == ("no_gate", SEEDS[-1]):
                    reason = {"message": "the loss is nan at step 41, first in layers.1.attention"}
                    write_json(folder / "runs" / arm / f"seed-{seed}" / "failure.json", reason)
                elif (arm, seed) != ("bank_first", SEEDS[-1]):
                    lines.append(write_job(folder, name, arm, seed, groups))
    for line in lines:
        kept = line["evaluations"] if evaluations is None else evaluations
        line["evaluations"] = {title: line["evaluations"][title] for title in kept}
    write_lines(folder / "results.jsonl", lines)
    return folder


def comparisons(group: str, arms: dict[str, str]) -> list[dict[str, Any]]:
    """The first arm against each other one, on two scores of 60 items."""
    first, *others = arms
    scores = {"recall": ("recall@128/12", "recall@512/48")}.get(group, (f"{group}:a", f"{group}:b"))
    return [
        {
            "group": group,
            "first": first,
            "second": other,
            "score": score,
            "items": 60,
            "wins": 20 + index,
            "ties": 35 - index,
            "losses": 5,
            "difference": (15 + index) / 60,
            "interval": {"low": 0.1, "high": 0.4 + index / 100, "kind": "items"},
            "p": 0.01,
            "p_holm": 0.04,
        }
        for index, other in enumerate(others)
        for score in scores
    ]


def write_job(
    folder: Path, group: str, arm: str, seed: int, groups: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The files of one job; returns its line of results."""
    run = folder / "runs" / arm / f"seed-{seed}"
    index = list(groups[group]["arms"]).index(arm)
    noise = Random(f"{arm} {seed}")
    write_run(run, arm, seed, index, noise, text=group != "recall")
    evaluations, scores = {}, {}
    for title, (task, results, found) in EVALUATIONS[group](arm, index, noise).items():
        write_evaluation(run, title, task, results, found)
        evaluations[title] = f"runs/{arm}/seed-{seed}/evaluations/{title}.json"
        scores |= found
    return {
        "study": "small",
        "group": group,
        "arm": arm,
        "label": groups[group]["arms"][arm],
        "seed": seed,
        "tuning": seed == TUNING_SEED,
        "config": {"training": {"seed": seed}},
        "overrides": {"training": {"seed": seed}, "model": {"layers": 4}},
        "matched": {"mlp_width": 512 + 8 * index} if groups[group]["match"] else None,
        "parameters": 1_234_567 + 10_000 * index,
        "tokens": 1_228_800,
        "flops": 1.2e13 * (1 + index / 10),
        "seconds": {"training": 75.0 + 9 * index + noise.random(), "evaluation": 31.5},
        "scores": scores,
        "evaluations": evaluations,
        "produced_by": PRODUCED_BY,
    }


def write_run(
    run: Path, arm: str, seed: int, index: int, noise: Random, *, text: bool, steps: int = 300
) -> None:
    source = "stdlib" if text else "recall"
    info = {
        **PRODUCED_BY,
        "seed": seed,
        "parameters": 1_234_567 + 10_000 * index,
        "description": arm,
        "data": {"source": source, "fingerprint": "f00dcafe"},
        "sequence_length": LENGTH,
        "steps": steps,
        "tokens": steps * 4096,
    }
    write_json(run / "run.json", info)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3.1 - index / 20 + 5.2 * math.exp(-step / 60) + 0.1 * noise.gauss(0, 1)
        seconds = step * (0.25 + index / 40)
        lines.append({"step": step, "loss": loss, "tokens": step * 4096, "seconds": seconds})
        if text and step % 25 == 0:
            bits = 1.75 - index / 40 + 1.5 * math.exp(-step / 90) + 0.02 * noise.random()
            lines.append({"step": step, "held_out_bpb": bits})
    write_lines(run / "metrics.jsonl", lines)


def write_evaluation(
    run: Path,
    title: str,
    task: str,
    results: dict[str, Any],
    scores: dict[str, float],
) -> None:
    record = {
        "task": task,
        "name": None if title == task else title,
        "settings": {"type": task, "sequences": 256},
        "results": results,
        "scores": scores,
        "produced_by": PRODUCED_BY,
        "bos_policy": "none: texts are read as they are",
        "prompt_hash": "0011223344556677",
    }
    write_json(run / "evaluations" / f"{title}.json", record)


def recall(arm: str, index: int, noise: Random) -> dict[str, Any]:
    grid, scores = [], {}
    for (length, pairs), mean in zip(SETTINGS, ACCURACY[arm], strict=True):
        value = min(1.0, max(0.0, mean + 0.02 * noise.gauss(0, 1)))
        grid.append({"length": length, "pairs": pairs, "accuracy": value, "queries": 3072})
        scores[f"recall@{length}/{pairs}"] = value
    distances = [
        {
            "length": length,
            "pairs": pairs,
            "from": start,
            "below": 2 * start,
            "accuracy": min(1.0, ACCURACY[arm][2] * (1 - 0.08 * math.log2(start / 16)) + 0.2),
            "queries": 100,
        }
        for length, pairs in SETTINGS[:3]
        for start in (16, 32, 64, 128)
        if 2 * start <= length
    ]
    mqar = {"grid": grid[:3], "by_distance": distances}
    statistics = {
        "layers": [
            {
                "layer": layer,
                "rows": 64.0 + layer,
                "budget": 96,
                "appended": 64,
                "merged": 320 + index,
                "append_similarity": 0.21,
                "merge_similarity": [0.71, 0.75],
                "dead_rows": 0.02,
                "temperature": [1.1, 1.3],
            }
            for layer in (1, 3)
        ]
    }
    found = {
        "recall": ("recall", {"grid": grid, "chance": 1 / 32}, scores),
        "mqar": ("mqar", mqar, {"mqar@all": ACCURACY[arm][1]}),
        "memory": ("memory", memory(index), {"memory@32768": 1.0}),
    }
    if arm.startswith("kvm"):
        found["memory-statistics"] = ("memory-statistics", statistics, {})
    return found


def needle(arm: str, index: int, noise: Random) -> dict[str, Any]:
    fall = (0.34, 0.5, 0.06)[index]
    rows, depths, scores = [], [], {}
    for task in ("niah_single", "niah_multikey"):
        for k, length in enumerate((512, 1024, 2048, 4096)):
            mean = min(1.0, max(0.0, 0.98 - fall * k + 0.02 * noise.gauss(0, 1)))
            row = {"task": task, "length": length, "score": mean, "samples": 50}
            rows.append({**row, "standard_error": 0.05})
            scores[f"ruler:{task}@{length}"] = mean
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                value = min(1.0, max(0.0, mean + 0.1 * (depth - 0.5)))
                depths.append(
                    {"task": task, "length": length, "depth": depth, "score": value, "samples": 10}
                )
    return {
        "ruler": ("ruler", {"rows": rows, "depths": depths}, scores),
        "position-loss": ("position-loss", position_loss(index, noise), {}),
        "bpb": (
            "bpb",
            {"bpb": 1.7 + index / 50},
            {"bpb": 1.7 + index / 50 + noise.random() / 99},
        ),
        "memory": ("memory", memory(index), {}),
        "decode-speed": ("decode-speed", {}, {"decode-speed": 61.5 + index + noise.random()}),
    }


def bank(arm: str, index: int, noise: Random) -> dict[str, Any]:
    bpb = 1.712 - index / 100 + 0.004 * noise.gauss(0, 1)
    saved = [
        {
            "tokens": 2**k,
            "batch": batch,
            "of_values": 0.5 - 32_768 / (batch * 2**k) / 2,
            "of_keys_and_values": (0.5 - 32_768 / (batch * 2**k) / 2) / 2,
        }
        for batch in (1, 8)
        for k in range(15, 21)
    ]
    found = {
        "bpb": ("bpb", {"bpb": bpb}, {"bpb": bpb}),
        "memory": (
            "memory",
            {**memory(0), **({"saved": saved} if arm == "bank_bank" else {})},
            {},
        ),
        "samples": (
            "samples",
            {
                "samples": [
                    {
                        "prompt": "def main(",
                        "text": "argv):\n    if x < 3 & y > 4:\n"
                        "        '<script>alert(1)</script>'\n",
                    }
                ]
            },
            {},
        ),
        "core": (
            "core",
            {"tasks": []},
            {"core": 0.06 + index / 100, "core:arc_easy": 0.31 + noise.random() / 30},
        ),
    }
    if arm != "bank_standard":
        parts = []
        for layer in range(4):
            for part in ("contextual", "bank") if arm != "bank_bank" else ("bank",):
                rms = 1.4 + 0.4 * layer + 0.1 * noise.random() if part == "bank" else None
                size = 0.8 / (1 + 0.3 * layer) if part == "bank" else 0.4 + 0.1 * layer
                parts.append(
                    {
                        "layer": layer,
                        "part": part,
                        "coefficient": size,
                        "table_rms": rms,
                        "product": None if rms is None else rms * size,
                        "loss_whole": 3.1,
                        "loss_without": 3.1 + 0.3 * size / (1 + layer) + 0.02 * noise.random(),
                    }
                )
        found["parts"] = ("parts", {"parts": parts}, {})
    return found


EVALUATIONS = {"recall": recall, "needle": needle, "bank": bank}


def position_loss(index: int, noise: Random) -> dict[str, Any]:
    """Losses of the arm: the first one, full attention, rises beyond the training length."""
    edges = (0, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    shift = 0.02 * noise.gauss(0, 1)
    buckets = []
    for start, stop in pairwise(edges):
        position = (start + stop) / 2
        excess = math.log2(max(position / LENGTH, 1))
        loss = 3.0 + 4 / (1 + position / 12) + (0.35, 0.02, 0.01)[index] * excess + index / 50
        buckets.append({"start": start, "stop": stop, "loss": loss + shift, "standard_error": 0.03})
    return {
        "training_length": LENGTH,
        "length": 8 * LENGTH,
        "documents": 24,
        "buckets": buckets,
        "at": {},
    }


def memory(index: int) -> dict[str, Any]:
    def rows(tokens: int) -> float:
        return 128 + (tokens, 64, 4 * math.sqrt(tokens), 8 * math.sqrt(tokens), 256)[index]

    contexts = [{"tokens": 2**k, "bytes": int(rows(2**k) * 4096)} for k in range(10, 21)]
    return {"contexts": contexts, "table_bytes": 0, "parameter_bytes": 5_000_000}
