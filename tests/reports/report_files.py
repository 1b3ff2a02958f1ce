"""Result files as a demo leaves them, with made-up numbers of a realistic shape."""

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

ARMS = {
    "full": "Full attention",
    "block_window": "Block window, 64 tokens",
    "kvm_fixed": "KVM, 64 rows",
    "kvm_sqrt": "KVM, 4·sqrt(N) rows",
    "kvm_sqrt_bank": "KVM, 4·sqrt(N) rows + bank",
}
RECALL_ARMS = {
    "full": "Full attention",
    "kvm_fixed": "KVM, 8 rows",
    "kvm_sqrt": "KVM, 4·sqrt(N) rows",
}
SETTINGS = [(128, 12), (128, 24), (512, 12), (512, 48), (1024, 12)]
ACCURACY = {
    "full": [1.0, 1.0, 0.996, 0.997, 0.852],
    "kvm_fixed": [0.761, 0.606, 0.725, 0.354, 0.686],
    "kvm_sqrt": [0.990, 0.965, 0.979, 0.910, 0.931],
}
TRAINING_LENGTH = 512
PRODUCED_BY = {
    "version": "0.1.0",
    "commit": "0123abc",
    "python": "3.11.7",
    "torch": "2.13.0",
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "seed": 0,
}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_evaluation(folder: Path, task: str, results: dict[str, Any], **settings: Any) -> None:
    record = {"task": task, "settings": settings, "produced_by": PRODUCED_BY, "results": results}
    write_json(folder / "evaluations" / f"{task}.json", record)


def write_run(folder: Path, description: str, *, steps: int, seed: int, **more: Any) -> None:
    run = {
        **PRODUCED_BY,
        "seed": seed,
        "parameters": 1_234_567,
        "description": description,
        "data": {"source": "stdlib", "fingerprint": "f00dcafe", "python": "3.11.7"},
        "sequence_length": TRAINING_LENGTH,
        "steps": steps,
        "tokens": steps * 4096,
    }
    write_json(folder / "run.json", {**run, **more})
    noise = Random(len(description) + seed)
    lines = []
    for step in range(1, steps + 1):
        loss = 3.1 + 5.2 * math.exp(-step / 60) + 0.1 * noise.gauss(0, 1)
        lines.append({"step": step, "loss": loss, "tokens": step * 4096, "seconds": step / 4})
        if step % 50 == 0:
            bits = 1.7 + 1.5 * math.exp(-step / 90) + 0.02 * noise.random()
            lines.append({"step": step, "held_out_bpb": bits})
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + "\n", encoding="utf-8")


def position_loss(index: int) -> dict[str, Any]:
    """Losses of the arm: the first one, full attention, rises beyond the training length."""

    def loss(start: int, stop: int) -> float:
        position = (start + stop) / 2
        excess = math.log2(max(position / TRAINING_LENGTH, 1))
        return 3.0 + 4 / (1 + position / 12) + (0.35 if index == 0 else 0.01) * excess + index / 50

    edges = [0, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    buckets = [
        {"start": start, "stop": stop, "loss": loss(start, stop), "standard_error": 0.03}
        for start, stop in pairwise(edges)
    ]
    at = {}
    for multiple in (1, 2, 4, 8):
        start, stop = multiple * TRAINING_LENGTH // 2, multiple * TRAINING_LENGTH
        at[str(multiple)] = {"start": start, "stop": stop, "standard_error": 0.04}
        at[str(multiple)]["loss"] = loss(start, stop)
    return {
        "training_length": TRAINING_LENGTH,
        "length": 8 * TRAINING_LENGTH,
        "documents": 24,
        "buckets": buckets,
        "at": at,
    }


def memory(name: str) -> dict[str, Any]:
    def rows(tokens: int) -> float:
        window = 128
        grown = {"full": tokens, "block_window": 0, "kvm_fixed": 64}
        return window + grown.get(name, 4 * math.sqrt(tokens))

    sizes = [{"tokens": 2**k, "bytes": int(rows(2**k) * 4 * 1024)} for k in range(10, 21)]
    tables = 3 * 2**20 if name.endswith("bank") else 0
    return {"contexts": sizes, "table_bytes": tables, "parameter_bytes": 5_000_000}


def write_language_arm(folder: Path, name: str, steps: int = 300) -> None:
    arm = folder / "language" / name
    index = list(ARMS).index(name)
    write_run(arm, ARMS[name], steps=steps, seed=0)
    write_evaluation(arm, "bpb", {"bpb": 1.712 + index / 100, "tokens": 100_000}, split="held-out")
    write_evaluation(arm, "position-loss", position_loss(index))
    write_evaluation(arm, "memory", memory(name), batch_size=1)
    speed = {"context": 8192, "tokens_per_second": 61.5 + index, "memory_bytes": 2**20}
    write_evaluation(arm, "decode-speed", speed)


def write_recall_run(folder: Path, name: str, seed: int) -> None:
    run = folder / "recall" / f"{name}-seed{seed}"
    data = {"source": "recall", "keys": 64, "values": 32}
    write_run(run, RECALL_ARMS[name], steps=60, seed=seed, data=data, sequence_length=128)
    grid = [
        {"length": length, "pairs": pairs, "accuracy": value - seed / 50, "queries": 3072}
        for (length, pairs), value in zip(SETTINGS, ACCURACY[name], strict=True)
    ]
    write_evaluation(run, "recall", {"grid": grid})


def write_demo(folder: Path) -> Path:
    """A complete demo."""
    for name in ARMS:
        write_language_arm(folder, name)
    for name in RECALL_ARMS:
        for seed in (0, 1):
            write_recall_run(folder, name, seed)
    bigram = {"task": "bigram", "results": {"bpb": 2.345, "training_tokens": 1_228_800}}
    write_json(folder / "bigram.json", bigram)
    sample = {
        "arm": "kvm_sqrt_bank",
        "prompt": "def main(",
        "text": "argv):\n    if x < 3 & y > 4:\n        return '<script>alert(1)</script>'\n",
        "tokens_per_second": 55.2,
        "memory_bytes": 1_536_000,
    }
    write_json(folder / "samples.json", [sample])
    return folder
