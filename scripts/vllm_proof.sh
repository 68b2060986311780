#!/usr/bin/env bash
# vLLM with Mjolnir's backend on a GPU, from the root of a checkout: outputs, speed, the server. vllm.json and logs go to
# the folder $1; further arguments go to `benchmarks/vllm/proof.py run`: --only PARTS, --gguf FILE, --budget-s SECONDS.
#
# vLLM and Mjolnir's dependencies are importable. Without the CuTe DSL, MJOLNIR_KERNEL_CACHE names a folder of kernels
# compiled elsewhere, of the same source; `scripts/vllm_proof.sh --compile FOLDER` makes it. Without git, MJOLNIR_COMMIT
# names the commit.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --compile ]; then
  # Groups of 3 and 4 query heads, up to 4 query tokens: 8 and 16 rows.
  exec "${PYTHON:-python3}" -m mjolnir compile --out "${2:?the folder for kernels}" \
    'decode_sm_90a_fp8_qbf16_obf16_d*[48]_r8_split_pdl' 'decode_sm_90a_fp8_qbf16_obf16_d*[48]_r16_split_pdl' \
    'decode_sm_90a_bf16_qbf16_obf16_d*[48]_r8_split_pdl' 'decode_sm_90a_bf16_qbf16_obf16_d*[48]_r16_split_pdl' \
    'decode_sm_90a_nvfp4_qbf16_obf16_d128_r8*_split_pdl' 'decode_sm_90a_nvfp4_qbf16_obf16_d128_r16*_split_pdl'
fi
out=${1:?the folder for results}
shift
# A checkout is not installed: this is the part of an installation by which vLLM finds the plugin.
dist=$(mktemp -d)
mkdir "$dist/mjolnir_attention-0.0.0.dist-info"
printf 'Metadata-Version: 2.1\nName: mjolnir-attention\nVersion: 0.0.0\n' > "$dist/mjolnir_attention-0.0.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nmjolnir = mjolnir.integrations.vllm.plugin:register\n' \
  > "$dist/mjolnir_attention-0.0.0.dist-info/entry_points.txt"
export PYTHONPATH=$PWD:$dist${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/vllm/proof.py run --out "$out" "$@"
