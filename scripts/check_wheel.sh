#!/usr/bin/env bash
# Build the wheel and use it as a user would, outside the checkout and without extras: import,
# train, generate; on the oldest supported Python and on the newest one found here.
#
#   scripts/check_wheel.sh [PYTHON]      PYTHON: has the package `build`; default .venv/bin/python
#   MIN_PYTHONS=2 scripts/check_wheel.sh fails where fewer were found; the default is 1
#
# The environments stay in .cache/wheel, so that a rerun installs the wheel alone; they are made
# anew when pyproject.toml, constraints.txt or the Python changes. To start afresh: rm -r .cache/wheel
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
build_python=${1:-.venv/bin/python}
oldest=3.11
newest_first=(3.14 3.13 3.12) # torch 2.13.0 has wheels up to 3.14

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1
unset PYTHONPATH

# Print an interpreter for the version $1 that runs and can make environments, or fail.
find_python() {
    local candidate
    for candidate in $(type -ap "python$1") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c "import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Make the environment $2 with the interpreter $1, unless it is there; then install the wheel.
install_wheel() {
    local python=$1 venv=$2 key
    key=$(cat "$root"/{pyproject.toml,constraints.txt} <("$python" -VV) | cksum)
    if [[ $(cat "$venv/key" 2>/dev/null) != "$key" ]]; then
        rm -rf "$venv"
        "$python" -m venv "$venv"
        "$root/scripts/install_torch.sh" "$venv/bin/python" \
            "${TORCH_INDEX-https://download.pytorch.org/whl/cpu}"
        "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" "$wheel"
        echo "$key" >"$venv/key"
    fi
    "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
    "$venv/bin/python" -m pip check
}

write_inputs() {
    mkdir corpus
    for document in {1..12}; do
        for line in {1..200}; do
            echo "In document $document, line $line: $document times $line is $((document * line))."
        done >"corpus/$document.txt"
    done
    cat >tiny.yaml <<'YAML'
model:
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  plan:
    - memory: {type: kvm, chunk_size: 8, budget: {type: power_law, factor: 2, exponent: 0.5}}
    - {where: last_third, values: {type: bank}}
data: {source: "files:corpus/*.txt", vocab_size: 300, sequence_length: 64, batch_size: 4}
training: {recipe: kvm, steps: 8, warmup_steps: 2}
YAML
}

# Use what is installed in the environment $1, from the current folder.
use_wheel() {
    local bin=$1/bin
    local -x XDG_CACHE_HOME=$PWD/cache HF_HUB_OFFLINE=1
    "$bin/python" - "$root" <<'PY'
import sys
from pathlib import Path

import meanbank

package, checkout = Path(meanbank.__file__).parent, Path(sys.argv[1])
assert package.is_relative_to(sys.prefix), f"imported from {package}, not the installed wheel"
assert checkout not in map(Path, sys.path), f"{checkout} is on sys.path"
assert (package / "py.typed").is_file(), "py.typed is missing from the wheel"
for folder in ("configs", "studies"):
    assert any((package / "bundled" / folder).rglob("*.yaml")), f"{folder} are missing from the wheel"
print(f"meanbank {meanbank.__version__} imported on Python {sys.version.split()[0]}")
PY
    "$bin/meanbank" --help >/dev/null
    "$bin/meanbank" train tiny.yaml --set training.steps=6 --out run
    "$bin/meanbank" generate run --prompt "In document" --max-new-tokens 8
}

check() { # version, interpreter
    local venv=$root/.cache/wheel/python$1
    echo "== wheel on Python $1 ($2)"
    install_wheel "$2" "$venv"
    mkdir "$work/python$1"
    pushd "$work/python$1" >/dev/null
    write_inputs
    use_wheel "$venv"
    popd >/dev/null
    checked+=("$1")
}

cd "$root"
"$build_python" -m build --wheel --outdir "$work" . >"$work/build.log" 2>&1 ||
    { cat "$work/build.log" >&2; exit 1; }
wheel=$(echo "$work"/meanbank-*.whl)

checked=()
for version in "${newest_first[@]}"; do
    if python=$(find_python "$version"); then
        check "$version" "$python"
        break
    fi
    echo "skipped: python$version not found"
done
if python=$(find_python "$oldest"); then
    check "$oldest" "$python"
else
    echo "skipped: python$oldest not found"
fi
if ((${#checked[@]} < ${MIN_PYTHONS:-1})); then
    echo "check_wheel: checked ${#checked[@]} Pythons, ${MIN_PYTHONS:-1} are required" >&2
    exit 1
fi
echo "check_wheel: the wheel works on Python ${checked[*]}"
