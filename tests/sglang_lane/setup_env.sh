#!/usr/bin/env bash
# The environment of the SGLang lane: a CPU-only SGLang, 1.3 GB beside torch.
#   tests/sglang_lane/setup_env.sh [DIRECTORY]     (default .venv-sglang)
# PYTHON names the interpreter (3.11), TORCH the requirement of a CPU torch, as in the Makefile.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-.venv-sglang}
python=${PYTHON:-python3.11}
torch=${TORCH:-torch==2.13.0}

stamp="$venv/.installed"
wanted=$(cat "$here/requirements.txt" "$here/requirements-nodeps.txt" "$here/setup_env.sh" | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

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
