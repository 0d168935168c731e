#!/usr/bin/env bash
# ./run.sh [key=value ...]          the record run on all visible GPUs; NPROC=2 ./run.sh for fewer
# ./run.sh train key=value ...      the same, with options
# ./run.sh demo [key=value ...]     a toy model on any machine, set-up included
# ./run.sh test [pytest arguments]  the tests, set-up included
# PYTHON= chooses the interpreter (default python3).
set -euo pipefail
cd "$(dirname "$0")"
base=${PYTHON:-python3}

fail() {
    echo "error: $*" >&2
    exit 2
}

# has PYTHON MODULE...: true if that Python finds all the modules.
has() {
    "$1" -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' "${@:2}" 2>/dev/null
}

# choose_python FILE MODULE...: set $python to one with the modules: the current one as it is, else .venv with FILE's pins.
choose_python() {
    local file=$1
    shift
    command -v "$base" >/dev/null || fail "$base is not on PATH: install Python 3.10 or newer, or set PYTHON=."
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$base" -V) is too old: set PYTHON= to Python 3.10 or newer."
    python=$base
    if ! has "$base" "$@"; then
        python=.venv/bin/python
        if ! has "$python" "$@"; then
            echo "setting up .venv from $file (once, needs the network)"
            "$base" -m venv .venv ||
                fail "$base cannot make $PWD/.venv: make this folder writable, or install the venv module" \
                    "(apt-get install python3-venv)."
            "$python" -m pip install --quiet --disable-pip-version-check -r "$file" ||
                fail "pip could not install $file (its message is above): check the network, then run this again."
        fi
    fi
    "$python" - "$file" <<'PY' || true
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    from pip._vendor.packaging.requirements import Requirement
except ImportError:  # a Python without pip: its packages are somebody else's care
    sys.exit()

lines = open(sys.argv[1]).read().splitlines()
for line in lines:
    if line.startswith("-r "):
        lines += open(line[3:].strip()).read().splitlines()
    line = line.split(" #")[0].strip()
    if not line or line.startswith(("#", "-r")):
        continue
    pin = Requirement(line)
    if pin.marker and not pin.marker.evaluate():
        continue
    try:
        found = version(pin.name)
    except PackageNotFoundError:
        found = "missing"
    if found == "missing" or not pin.specifier.contains(found.split("+")[0], prereleases=True):
        print(f"note: {pin.name} is {found}, the pin is {pin.specifier}", file=sys.stderr)
PY
}

run_modules="torch numpy tqdm"
case "${1:-}" in
demo) # one process, whatever NPROC= says
    shift
    choose_python requirements.txt $run_modules
    compgen -G "${DATA_PATH:-.}/data/demo/*.bin" >/dev/null || "$python" data/demo_text.py
    exec "$python" train_gpt.py preset=demo "$@"
    ;;
test)
    shift
    choose_python requirements-dev.txt $run_modules pytest xdist hypothesis scipy matplotlib
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # one thread a worker: the tensors are small
    exec "$python" -m pytest -q -n auto --maxprocesses 8 --dist worksteal "$@"
    ;;
train) shift ;;
-h | --help | help)
    sed -n '2,6s/^# //p' "$0"
    exit 0
    ;;
esac

choose_python requirements.txt $run_modules
for option in "$@"; do
    case "$option" in -h | --help | show=?* | preset=demo) exec "$python" train_gpt.py "$@" ;; esac
done
nproc=${NPROC:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
PREFLIGHT_WORLD_SIZE=$nproc "$python" train_gpt.py "$@"
if [ "$python" = "$base" ] && [ -z "${PYTHON:-}" ] && command -v torchrun >/dev/null; then
    exec torchrun --standalone --nproc_per_node="$nproc" train_gpt.py "$@"
fi
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$nproc" train_gpt.py "$@"
