#!/usr/bin/env bash
# Everything that needs a GPU, from the root of a checkout: tests, verification, benchmark. Results go to the folder $1.
#
# PEERS names a folder of other kernels (benchmarks/README.md): the full suite is then timed with them, instead of core.
# Without the CuTe DSL, MJOLNIR_KERNEL_CACHE names a folder of kernels compiled elsewhere, of the same source:
#   PYTHONPATH=. python tests/running.py FOLDER && python -m mjolnir compile --suite full --out FOLDER
# Without git, MJOLNIR_COMMIT names the commit.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?the folder for results}
mkdir -p "$out"
failed=0
PYTHONPATH=.:tests:${PYTHONPATH-} python3 -m pytest -q -p no:cacheprovider -m gpu tests ${PYTEST_ARGS-} || failed=1
python3 -m mjolnir verify --json "$out/verify.json" || failed=1
python3 -m mjolnir bench-writes --json "$out/write.json" || failed=1
what=(--suite core)
[ -n "${PEERS-}" ] && what=(--suite full --peers "$PEERS")
# Once more if a peer took the process with it: the rows that are done stay.
python3 -m mjolnir bench "${what[@]}" --json "$out/decode.json" ||
  python3 -m mjolnir bench "${what[@]}" --json "$out/decode.json" --skip-done || failed=1
exit $failed
