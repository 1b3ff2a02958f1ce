"""The lm-evaluation-harness with our model classes known to it.

    python -m meanbank.evaluation.harness run --model hf --model_args pretrained=FOLDER --tasks ...

Everything after the module's name goes to lm_eval. From Python, `import meanbank` is all it takes:
`lm_eval.models.huggingface.HFLM(pretrained=model, tokenizer=tokenizer)` takes a model of ours. The
evaluation `harness` does that, see `harness_tasks.py`.
"""

import sys

from meanbank.evaluation.harness_tasks import NEEDED


def main() -> int:
    """Run lm_eval's own command line, after importing this package has registered the classes."""
    try:
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"{NEEDED} ({error})", file=sys.stderr)
        return 2
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
