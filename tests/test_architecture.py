"""Imports point one way, and `import meanbank` stays light. CONTRIBUTING.md has the picture."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "meanbank"

LIBRARY = {"core", "ops", "memory", "values", "model"}
# Package -> the packages of meanbank that it may import besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "ops": {"core"},
    "memory": {"core", "ops"},
    "values": {"core", "ops"},
    "model": LIBRARY - {"model"},
    "data": {"core"},
    "interop": LIBRARY,
    # it evaluates as it goes, and measures what the machine can do
    "training": LIBRARY | {"data", "evaluation", "benchmarks"},
    "evaluation": LIBRARY | {"data"},
    "benchmarks": LIBRARY | {"data"},
    "reports": set(),
}
MAY_IMPORT["studies"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)

# Extras, and dependencies that are only for studies and reports: not imported by `import meanbank`.
EXTRAS = [
    "datasets",
    "pyarrow",
    "triton",
    "lm_eval",
    "tensorboard",
    "wandb",
    "trackio",
    "submitit",
]
REPORTING = ["matplotlib", "scipy"]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import in the file, relative ones made absolute.

    `from a.b import c` gives `a.b.c`: whether `c` is a module does not matter here.
    """
    package = ["meanbank", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def sources(package: str) -> list[Path]:
    """The modules of a package of meanbank; skips the test while the package does not exist."""
    if not (PACKAGE / package).is_dir():
        pytest.skip(f"meanbank/{package} does not exist yet")
    return sorted((PACKAGE / package).rglob("*.py"))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert packages <= set(MAY_IMPORT), "place new packages in MAY_IMPORT and in CONTRIBUTING.md"
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules <= {"__init__", "__main__"}, "modules belong in a package"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    allowed = {package, "__version__"} | MAY_IMPORT[package]
    pattern = rf"meanbank\.({'|'.join(allowed)})\b"
    wrong = [
        f"{place(path, line)} imports {name}"
        for path in sources(package)
        for line, name in imports(path)
        if name.split(".")[0] == "meanbank" and not re.match(pattern, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_reports_need_no_torch() -> None:
    heavy = {"torch", "transformers", "safetensors", "tokenizers"}
    wrong = [
        f"{place(path, line)} imports {name}"
        for path in sources("reports")
        for line, name in imports(path)
        if name.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_fast_ops_do_not_import_the_reference() -> None:
    wrong = []
    for path in sources("ops"):
        parts = path.relative_to(PACKAGE / "ops").with_suffix("").parts
        if any(part.startswith(("fused", "triton")) for part in parts[1:]):
            wrong += [
                f"{place(path, line)} imports {name}"
                for line, name in imports(path)
                if name.startswith("meanbank.") and "reference" in name.split(".")
            ]
    assert not wrong, "\n".join(wrong)


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light() -> None:
    # What the transformers classes load by themselves (scipy, where it is installed) is not ours.
    code = """
import json, sys
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
before = set(sys.modules)
import meanbank
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = json.loads(run_python(code).splitlines()[-1])
    assert "meanbank" in loaded
    assert not set(loaded) & {*EXTRAS, *REPORTING}


def test_import_works_without_extras() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # None: importing it raises ImportError
import meanbank
"""
    run_python(code, *EXTRAS)
