#!/usr/bin/env bash
# tests/test_vllm_sources.py inside the Python code of each vLLM release that Mjolnir supports, on a machine without a GPU.
#
#   scripts/vllm_check.sh [PYTHON of an environment with Mjolnir's dev extra]
#
# Makes .venv-vllm once: what vLLM imports (tests/vllm_requirements.txt, 200 MB) and the source archives of the releases
# (47 MB each). Nothing of vLLM is compiled: it is told to be a CPU build, whose extensions are not there.
set -euo pipefail
cd "$(dirname "$0")/.."
releases=(0.26.0 0.33.0)
base=${1:-.venv/bin/python}
venv=.venv-vllm
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vLLM 0.33 needs Python 3.11 or later" >&2; exit 1; }

if [ ! -e "$venv/.installed" ]; then
  "$base" -m venv --clear "$venv"
  site=$("$base" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  echo "import site; site.addsitedir('$site')" > "$own/mjolnir-environment.pth" # torch, pytest and Mjolnir itself
  "$venv/bin/pip" install -q -r tests/vllm_requirements.txt
  "$venv/bin/pip" install -q --no-deps xgrammar==0.2.9 # declares CUDA packages
  touch "$venv/.installed"
fi
for release in "${releases[@]}"; do
  folder=$venv/vllm-$release
  if [ ! -e "$folder/.complete" ]; then
    rm -rf "$folder" && mkdir -p "$folder/vllm-$release+cpu.dist-info"
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$release SETUPTOOLS_SCM_PRETEND_VERSION=$release \
      "$venv/bin/pip" download -q --no-deps --no-binary vllm --no-build-isolation --dest "$folder" "vllm==$release"
    tar xzf "$folder/vllm-$release.tar.gz" -C "$folder" --strip-components=1 "vllm-$release/vllm"
    rm "$folder/vllm-$release.tar.gz"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" \
      > "$folder/vllm-$release+cpu.dist-info/METADATA"
    touch "$folder/.complete"
  fi
  echo "vLLM $release"
  HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING \
    PYTHONPATH=$folder:. "$venv/bin/python" -m pytest -q -p no:cacheprovider -W ignore tests/test_vllm_sources.py
done
