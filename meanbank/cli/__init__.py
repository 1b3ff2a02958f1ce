"""The command line: one thin file a verb."""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

import tyro
from transformers.utils.logging import disable_progress_bar

from meanbank.cli.bench import BENCH
from meanbank.cli.checkpoints import export_checkpoint, import_checkpoint
from meanbank.cli.context import build_context, show_context
from meanbank.cli.evaluate import evaluate
from meanbank.cli.generate import generate
from meanbank.cli.plan import plan
from meanbank.cli.plot import plot_mask, plot_memory
from meanbank.cli.prepare import prepare
from meanbank.cli.runs import runs
from meanbank.cli.study import STUDY
from meanbank.cli.train import train
from meanbank.core.errors import one_line

CONTEXT = {"build": build_context, "show": show_context}
PLOT = {"mask": plot_mask, "memory": plot_memory}


def _group(description: str, verbs: dict[str, Callable[..., int]]) -> Callable[..., Any]:
    """A verb that has verbs of its own."""
    actions = [
        Annotated[Any, tyro.conf.subcommand(name, constructor=_bound(verb))]
        for name, verb in verbs.items()
    ]

    def choose(action):
        return action

    union: Any = Union[tuple(actions)]  # noqa: UP007
    plain = tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[union]]
    choose.__annotations__, choose.__doc__ = {"action": plain}, description
    return choose


VERBS = {
    "prepare": prepare,
    "train": train,
    "runs": runs,
    "evaluate": evaluate,
    "generate": generate,
    "plan": plan,
    "import": import_checkpoint,
    "export": export_checkpoint,
}
# What tyro says where a value has the wrong form, in place of one line.
UNREADABLE = r"Error parsing (\S+): no type matching \{None\}\|(\w+) could .*? from \['(.*?)'\].*"
ERRORS = (ValueError, ImportError, OSError)  # what a user can put right


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `meanbank`.

    Exit codes: 0 done; 2 wrong input, told in one line; 130 and 143 after Ctrl-C and SIGTERM.
    MEANBANK_TRACEBACK=1 shows where an error came from.
    """
    disable_progress_bar()  # that of transformers; our own is enough
    call = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code = call()
    except KeyboardInterrupt:
        print("meanbank: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except ERRORS as error:
        if os.environ.get("MEANBANK_TRACEBACK"):
            raise
        print(f"meanbank: error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code)


def parse(arguments: list[str]) -> Callable[[], int]:
    """The verb that the arguments ask for, bound to them; tyro's box of errors becomes a line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(
                {
                    **{name: _bound(verb) for name, verb in VERBS.items()},
                    "context": _group("Read texts once, and go on from a file.", CONTEXT),
                    "study": _group("Run arms with seeds, and judge claims.", STUDY),
                    "plot": _group("Draw what a memory shows and where tokens went.", PLOT),
                    "bench": _group("Time operators, layers and models side by side.", BENCH),
                },
                prog="meanbank",
                args=arguments,
                description="Key-Value Means and Bank of Values: train, evaluate, generate, plan.",
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line for line in box.getvalue().splitlines() if not line.startswith("╭")]
        words = " ".join(re.sub(r"[╰╯│─]+", " ", " ".join(lines)).split())
        words = re.sub(UNREADABLE, r"\1 must be a \2, got '\3'", words)
        print(f"meanbank: error: {words}", file=sys.stderr)
        sys.exit(2)


def _bound(verb: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The verb with the same signature, which returns the call instead of making it."""

    @functools.wraps(verb)
    def bind(*arguments, **keywords):
        return functools.partial(verb, *arguments, **keywords)

    return bind
