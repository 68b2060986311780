#!/usr/bin/env bash
# Everything that needs a GPU, from the root of a checkout: tests, verification, benchmark. Results go to the folder $1.
#
# Without the CuTe DSL, MJOLNIR_KERNEL_CACHE names a folder of kernels compiled elsewhere, of the same source:
#   PYTHONPATH=. python tests/running.py FOLDER && python -m mjolnir compile --suite core --out FOLDER
# Without git, MJOLNIR_COMMIT names the commit.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?the folder for results}
mkdir -p "$out"
failed=0
PYTHONPATH=.:tests:${PYTHONPATH-} python3 -m pytest -q -p no:cacheprovider -m gpu tests ${PYTEST_ARGS-} || failed=1
python3 -m mjolnir verify --json "$out/verify.json" || failed=1
python3 -m mjolnir bench --suite core --json "$out/decode.json" || failed=1
exit $failed
