"""The command line: one thin file a verb."""

import os
import sys

import tyro
from transformers.utils.logging import disable_progress_bar

from meanbank.cli.demo import demo
from meanbank.cli.evaluate import evaluate
from meanbank.cli.generate import generate
from meanbank.cli.train import train
from meanbank.core.errors import one_line

ERRORS = (ValueError, ImportError, OSError)  # what a user can put right


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `meanbank`.

    Exit codes: 0 done; 2 wrong input, told in one line; 130 and 143 after Ctrl-C and SIGTERM.
    MEANBANK_TRACEBACK=1 shows where an error came from.
    """
    disable_progress_bar()  # that of transformers; our own is enough
    verbs = {"train": train, "evaluate": evaluate, "generate": generate, "demo": demo}
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            verbs,  # pyright: ignore[reportArgumentType]
            prog="meanbank",
            args=sys.argv[1:] if arguments is None else arguments,
            description="Key-Value Means and Bank of Values: train, evaluate, generate.",
        )
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
    sys.exit(code or 0)
