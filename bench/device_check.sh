#!/usr/bin/env bash
# Everything that only a CUDA device can show, in one run of at most 8 minutes and without a network:
#
#     bench/device_check.sh [OUT] [--seconds N] [--parts copies,ordering,llama-3.1-8b,tests,qwen3-32b]
#
# Needs python3 with torch (CUDA), transformers, numpy, scipy, typer, hypothesis and pytest, as on a machine set up for
# models; cupy and cuda.bindings for the fast ways to copy. What is missing travels as wheels in the folder WHEELS
# (default .whl), fetched where there is a network, for the Python and platform of the device's machine:
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d .whl msgspec
#
# Leaves device_check.json, device_check.txt (a table with device, driver, versions and date) and device_check.log in
# OUT (default results/device). A part that fails or takes too long does not lose the others.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/results/device
if [[ $# -gt 0 && $1 != --* ]]; then out=$1; shift; fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/kvlane"
for package in policy transfer streams bench; do ln -s "$root/$package" "$work/kvlane/$package"; done
# Not installed, so that nothing has to be built; its version is asked for like any other's.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml" | head -n 1)
mkdir "$work/kvlane-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: kvlane\nVersion: %s\n' "$version" > "$work/kvlane-$version.dist-info/METADATA"
export PYTHONPATH=$work:$work/site${PYTHONPATH:+:$PYTHONPATH}

wheels=${WHEELS:-$root/.whl}
if compgen -G "$wheels/*.whl" > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$wheels"/*.whl
fi

missing=$(python3 - <<'NAMES'
from importlib.util import find_spec
needed = "torch transformers numpy scipy typer msgspec hypothesis pytest".split()
print(" ".join(name for name in needed if find_spec(name) is None))
NAMES
)
if [[ -n $missing ]]; then
  echo "device_check.sh: $(command -v python3) has no $missing: put their wheels into $wheels, as said at the top" >&2
  exit 2
fi

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
cd "$root"
python3 -m kvlane.bench.device_check --out "$out" "$@"
