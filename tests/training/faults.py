"""Runs that are killed, refused by the disk or asked to stop; `test_faults.py` starts this script.

`python faults.py WORK TRIALS.json` imports meanbank once and forks for every run; it prints what
became of each trial as JSON. A fork has the one thread that a process of its own would begin with.
"""

import errno
import io
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import yaml

from meanbank.cli import main
from meanbank.core.provenance import commit
from meanbank.training import trainer
from meanbank.training.checkpoint import MANIFEST, checkpoints, damage, step_of
from meanbank.training.metrics import read_metrics

STEPS, EVERY = 9, 3
WORDS = ["the", "memory", "keeps", "a", "mean", "of", "keys", "values", "and", "tokens"]


def write_config(folder: Path) -> Path:
    """A model of a few thousand weights on a little text, that is evaluated, too."""
    generator = random.Random(0)
    (folder / "corpus").mkdir()
    for number in range(6):
        text = " ".join(generator.choices(WORDS, k=100 + 10 * number))
        (folder / "corpus" / f"{number}.txt").write_text(text)
    kvm = {"type": "kvm", "chunk_size": 4, "budget": {"type": "power_law", "factor": 2}}
    plan = [{"memory": kvm}, {"where": "last_third", "values": "bank"}]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    source = {"source": f"files:{folder}/corpus/*.txt", "vocab_size": 270}
    settings = {
        "model": {**sizes, "plan": plan},
        "data": {**source, "sequence_length": 8, "batch_size": 2},
        "training": {
            "steps": STEPS,
            "checkpoint_every": EVERY,
            "keep_last": 2,
            "evaluate_every": 4,
            "evaluation_tokens": 16,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


class Fault:
    """Does something at the n-th call (from 1) that writes, and keeps a list of all of them.

    at: None only counts. what: "kill", or the name of an `errno` that the call then raises, as do
    those after it. thread: only calls of a thread of this name count. step: only from that one.
    """

    now = 0

    def __init__(self, at, what, *, thread="checkpoint", step=0):
        self.at, self.what, self.thread, self.step = at, what, thread, step
        self.count, self.calls, self.lock = 0, [], threading.Lock()

    def __call__(self, name):
        if self.thread not in ("any", threading.current_thread().name) or Fault.now < self.step:
            return
        with self.lock:
            self.count += 1
            self.calls.append(name)
            hit = self.at is not None and self.count >= self.at
        if not hit:
            return
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(getattr(errno, self.what), os.strerror(getattr(errno, self.what)))

    def install(self):
        fault, plain_open = self, io.open

        class Raw(io.FileIO):
            def write(self, data):
                fault("write")
                return super().write(data)

        def opened(file, mode="r", buffering=-1, *args, **kwargs):
            if "b" not in mode or not set(mode) & set("wax+"):
                return plain_open(file, mode, buffering, *args, **kwargs)
            raw = Raw(file, mode.replace("b", ""))
            return raw if buffering == 0 else io.BufferedWriter(raw)

        def counted(name, call):
            def wrapped(*args, **kwargs):
                fault(name)
                return call(*args, **kwargs)

            return wrapped

        io.open = opened
        os.fsync = counted("fsync", os.fsync)
        os.rename, os.replace = counted("rename", os.rename), counted("rename", os.replace)
        os.mkdir = counted("mkdir", os.mkdir)


def watch_steps():
    """Have `Fault.now` tell the steps that the run of this process has done."""
    train_step = trainer.Trainer._train_step

    def watched(self, batches):
        figures = train_step(self, batches)
        Fault.now = self.step
        return figures

    trainer.Trainer._train_step = watched


def child(work, config, run, before=None):
    """Train, or go on with it, in a fork; returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        sys.stdout = sys.stderr = (work / "errors").open("w", buffering=1)
        watch_steps()
        if before:
            before()
        resume = ["--resume"] if (run / "config.yaml").is_file() else []
        main(["train", str(config), "--out", str(run), *resume])
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process):
    """The exit code of a child, negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def seen(run):
    """What is in a run's folder, for comparing it with another's."""
    lines = read_metrics(run / "metrics.jsonl")
    figures = [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    last = checkpoints(run)[-1]
    files = json.loads((last / MANIFEST).read_text())["files"]
    return {"figures": figures, "step": step_of(last), "files": files}


def state_after(run):
    """After a fault: steps that are lost, and checkpoints that are not whole."""
    path, found = run / "metrics.jsonl", checkpoints(run)
    done = max((line["step"] for line in read_metrics(path)), default=0) if path.is_file() else 0
    return {
        "done": done,
        "lost": done - (step_of(found[-1]) if found else 0),
        "broken": [str(p) for p in found if damage(p) or not (p / MANIFEST).is_file()],
        "writing": bool(list((run / "checkpoints").glob(".step-*.tmp"))),
    }


def trial(work, config, whole, duration, number, plan):
    """One run with a fault, which then goes on to its end."""
    run = work / f"run-{number}"
    result = dict(plan)
    fault = None
    if "at" in plan:
        fault = Fault(plan["at"], plan["what"], thread=plan["thread"], step=plan.get("step", 0))
    began = time.monotonic()
    process = child(work, config, run, fault and fault.install)
    if "moment" in plan:  # a share of how long a whole run takes
        time.sleep(plan["moment"] * duration)
        sent = time.monotonic()
        os.kill(process, plan["signal"])
        if "again" in plan:
            time.sleep(plan["again"] * duration)
            os.kill(process, plan["signal"])
        result["code"], result["seconds"] = ended(process), time.monotonic() - sent
    else:
        result["code"], result["seconds"] = ended(process), time.monotonic() - began
    result["said"] = (work / "errors").read_text()
    result |= state_after(run)
    result["resumed"] = ended(child(work, config, run))
    result["then"] = (work / "errors").read_text()
    result["same"] = result["resumed"] == 0 and seen(run) == whole
    result["left"] = [str(path) for path in run.rglob(".*.tmp")]
    return result


def count_calls(work, config, name, **which):
    """The calls that a `Fault` would count in a run without one."""
    counted = work / f"{name}.json"

    def install():
        fault, leave = Fault(None, None, **which), os._exit
        fault.install()

        def leave_counted(code):
            counted.write_text(json.dumps(fault.calls))
            leave(code)

        os._exit = leave_counted

    assert ended(child(work, config, work / name, install)) == 0, (work / "errors").read_text()
    return json.loads(counted.read_text())


def points(plan, calls):
    """A plan for so many calls, evenly spread."""
    places = random.Random(0).sample(range(1, len(calls) + 1), min(plan["points"], len(calls)))
    rest = {name: value for name, value in plan.items() if name not in ("points", "of")}
    return [{"at": at, **WHICH[plan["of"]], **rest} for at in sorted(places)]


# Where faults happen: in the second save, while there is a checkpoint before; or anywhere in a run.
WHICH = {
    "save": {"thread": "checkpoint", "step": 2 * EVERY - 1},
    "run": {"thread": "any", "step": 0},
}


def run_trials(work, plans):
    commit()  # once, not in every fork
    config = write_config(work)
    for name in ("first", "whole"):  # the first one prepares the corpus
        began = time.monotonic()
        assert ended(child(work, config, work / name)) == 0, (work / "errors").read_text()
        duration = time.monotonic() - began
    whole = seen(work / "whole")
    calls = {name: count_calls(work, config, name, **which) for name, which in WHICH.items()}
    plans = [
        each
        for plan in plans
        for each in (points(plan, calls[plan["of"]]) if "points" in plan else [plan])
    ]
    results = [
        trial(work, config, whole, duration, number, plan) for number, plan in enumerate(plans)
    ]
    return {"calls": calls, "duration": duration, "results": results}


if __name__ == "__main__":
    folder, trials = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    found = run_trials(folder, trials)
    (folder / "results.json").write_text(json.dumps(found))
