"""Runs on several ranks; `test_ranks.py` starts this script.

`python rank_trials.py WORK TRIALS.json` imports meanbank once and forks for every rank. A trial is
a list of runs, which one group of ranks trains one after the other; what became of each is printed
as JSON. As with torchrun, the store through which ranks find each other is in another process.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from meanbank.cli import main
from meanbank.core.provenance import commit
from meanbank.model import MeanbankForCausalLM
from meanbank.training import ranks as ranks_module
from meanbank.training import trainer
from meanbank.training.checkpoint import MANIFEST, checkpoints, damage, step_of
from meanbank.training.claim import status_of
from meanbank.training.metrics import read_metrics
from tests.training.faults import Fault, watch_steps, write_config


@contextlib.contextmanager
def meeting_point():
    """The port of a store in a process of its own."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        time.sleep(3600)
        os._exit(0)
    port = os.read(reading, 16).decode()
    os.close(reading)
    os.close(writing)
    try:
        yield port
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def begin(work, runs, rank, size, port):
    """One rank in a fork; returns its process id. What it says is in `said-RANK`."""
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        file = (work / f"said-{rank}").open("w", buffering=1)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        if size > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        ranks_module.ROLL_CALL = 2.0
        watch_steps()
        train_step = trainer.Trainer._train_step
        for run in runs:
            trainer.Trainer._train_step = planted(train_step, run, rank)
            trainer.MeanbankForCausalLM = doubled if run.get("double") else MeanbankForCausalLM
            what, since = run.get("what", "kill"), run.get("from", 0)
            fault = Fault(run.get("at"), what, thread="checkpoint", step=since)
            if rank == 0 and "from" in run:
                fault.install()
            code = call_main(work, run)
            (work / f"calls-{rank}").write_text(str(len(fault.calls)))
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # which a fork would leave out
        os._exit(code)


def call_main(work, run):
    folder = work / run["run"]
    resume = ["--resume"] if (folder / "config.yaml").is_file() and not run.get("anew") else []
    sets = [f"--set={each}" for each in run.get("set", [])]
    try:
        main(["train", str(work / "tiny.yaml"), "--out", str(folder), *sets, *resume])
    except SystemExit as stop:
        return stop.code or 0


def doubled(config):
    """A model in float64 whose weights are no start values."""
    model = MeanbankForCausalLM(config).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise)
    return model


def planted(train_step, run, rank):
    """`_train_step`, before which something happens at a step on one rank."""
    fault = run.get("fault", {})

    def step(self, batches):
        if self.step == fault.get("step") and rank == fault["rank"]:
            if fault["what"] == "nan":
                with torch.no_grad():
                    weight = self.model.get_parameter(fault["weight"])
                    getattr(weight, "_local_tensor", weight).fill_(float("nan"))
            else:
                os.kill(os.getpid(), getattr(signal, fault["what"]))
        return train_step(self, batches)

    return step


def group(work, runs, size, during=None):
    """Train on so many ranks; returns their exit codes and what they said.

    As torchrun does, it asks the others to stop once one has ended with an error.
    """
    with meeting_point() as port:
        ranks = [begin(work, runs, rank, size, port) for rank in range(size)]
        if during is not None:
            during(ranks)
        codes: list[int | None] = [None] * size
        while None in codes:
            for rank in [rank for rank, code in enumerate(codes) if code is None]:
                gone, status = os.waitpid(ranks[rank], os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if gone else None
                if codes[rank]:
                    for other in [r for r, code in zip(ranks, codes, strict=True) if code is None]:
                        os.kill(other, signal.SIGTERM)
            time.sleep(0.02)
    return codes, [(work / f"said-{rank}").read_text() for rank in range(size)]


def seen(run):
    """What is in a run's folder."""
    path, found = run / "metrics.jsonl", checkpoints(run)
    lines = read_metrics(path) if path.is_file() else []
    done = max((line["step"] for line in lines), default=0)
    return {
        "figures": [{k: v for k, v in line.items() if "second" not in k} for line in lines],
        "steps": [step_of(each) for each in found],
        "done": done,
        "lost": done - (step_of(found[-1]) if found else 0),
        "broken": [str(p) for p in found if damage(p) or not (p / MANIFEST).is_file()],
        "left": [str(path) for path in run.rglob(".*.tmp")],
        "status": status_of(run) if run.is_dir() else None,
    }


def trial(work, plan):
    """What a group of ranks gave, and every run's folder after it."""

    def kill(processes):
        time.sleep(plan["moment"])
        os.kill(processes[plan["rank"]], getattr(signal, plan["signal"]))

    began = time.monotonic()
    codes, said = group(work, plan["runs"], plan["ranks"], kill if "moment" in plan else None)
    seconds = time.monotonic() - began
    folders = {run["run"]: seen(work / run["run"]) for run in plan["runs"]}
    return {**plan, "codes": codes, "said": said, "seconds": seconds, "seen": folders}


def run_trials(work, plans):
    importlib.util.find_spec = lambda name: None  # no TensorBoard: it takes seconds to begin
    commit()  # once, not in every fork
    write_config(work)
    results = []
    for plan in plans:
        if "every_call" not in plan:
            results.append(trial(work, plan))
            continue
        (run,) = plan["runs"]  # killed at every call of a save that writes, one after the other
        calls = int((work / "calls-0").read_text())  # of the trial before
        for at in range(1, calls + 1):
            name = f"{run['run']}-{at}"
            results.append(trial(work, {**plan, "runs": [{**run, "run": name, "at": at}]}))
            again = {name: run[name] for name in ("set", "double") if name in run}
            results.append(trial(work, {**plan, "kind": "again", "runs": [{**again, "run": name}]}))
    return results


if __name__ == "__main__":
    folder, trials = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    (folder / "results.json").write_text(json.dumps(run_trials(folder, trials)))
