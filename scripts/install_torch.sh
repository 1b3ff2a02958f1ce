#!/usr/bin/env bash
# Install the pinned torch for PYTHON, as a CPU build where one can be had.
#
#   scripts/install_torch.sh PYTHON [INDEX]      INDEX: default PyTorch's CPU index; "" for none
#
# On Linux, PyPI's torch is the CUDA build of several GB, so the CPU index (and pip's own
# find-links) are asked first, and PyPI only if neither has the wheel or the index cannot be
# reached. PyPI's builds for other systems are CPU builds already.
set -euo pipefail

python=$1
index=${2-https://download.pytorch.org/whl/cpu}
pin=$(grep -E '^torch==' "$(dirname "$0")/../constraints.txt")
options=()
[[ -t 1 ]] || options+=(--quiet) # no progress bars in logs

if [[ $(uname -s) == Linux && -n $index ]]; then
    # --no-deps: torch's own dependencies come from PyPI afterwards, with those of meanbank.
    if "$python" -m pip install "${options[@]}" --no-deps --retries 1 --timeout 15 \
        --index-url "$index" "$pin"; then
        exit 0
    fi
    echo "install_torch: no $pin at $index (see above); taking the default index's build," \
        "which may be the CUDA build: 5 GB on disk"
fi
"$python" -m pip install "${options[@]}" "$pin"
