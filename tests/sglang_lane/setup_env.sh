#!/usr/bin/env bash
# The environment of the SGLang lane: a CPU-only SGLang, 1.3 GB beside torch. Made once; again where a requirement,
# this script, its place or TORCH changed.
#   tests/sglang_lane/setup_env.sh [DIRECTORY]     (default .venv-sglang)
# PYTHON names the interpreter (3.11), TORCH the requirement of a CPU torch, as in the Makefile.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-.venv-sglang}
python=${PYTHON:-python3.11}
torch=${TORCH:-torch==2.13.0}

stamp="$venv/.installed"
wanted=$({ cat "$here/requirements.txt" "$here/requirements-nodeps.txt" "$here/setup_env.sh"; echo "$here $torch"; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

failed() {
    echo "The environment $venv of the SGLang lane could not be made; the reason stands above." >&2
    echo "It takes a package index (network, or pip's own settings), Python 3.11 and 3 GB of disk; here are" \
        "$("$python" --version 2>&1) and $(df -Ph "$(dirname "$venv")" | awk 'NR == 2 {print $4}') free." >&2
    echo "No test of the lane ran. rlpost itself does not need it: \`make test\` is all the rest." >&2
}
trap failed ERR

test -x "$venv/bin/python" || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# shellcheck disable=SC2086  (TORCH may hold pip options)
"${pip[@]}" $torch
"${pip[@]}" -r "$here/requirements.txt"
"${pip[@]}" --no-deps -r "$here/requirements-nodeps.txt"
# Every process of the lane, also those that the engine spawns, sees the stand-ins.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\nimport torchvision_schemas\n' "$here/stubs" > "$site/sglang_cpu_lane.pth"
echo "$wanted" > "$stamp"
