#!/usr/bin/env bash
# Installs the peers that are Python packages, each into its own environment under .peers/.
# Usage: benchmarks/install_peers.sh [openvino] [vllm]   (default: both; Python 3.11)
# torch comes first because a range that another package gives would pull a CUDA build of several gigabytes; vLLM asks
# for the CPU build by its local version (2.13.0+cpu), so pip must be able to find that wheel.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- openvino vllm
for name in "$@"; do
  folder=$here/.peers/$name
  test -x "$folder/bin/python" || python3 -m venv "$folder"
  "$folder/bin/pip" install -q --disable-pip-version-check torch==2.13.0
  "$folder/bin/pip" install -q --disable-pip-version-check -r "$here/benchmarks/peers/$name.txt"
  # Where they are built for CUDA they fail at import; nothing here needs them.
  "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
done
