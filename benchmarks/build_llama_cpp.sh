#!/usr/bin/env bash
# Builds llama.cpp's server natively for the comparison, from the source that the llama-cpp-python sdist carries.
# Usage: benchmarks/build_llama_cpp.sh [FOLDER]   (default .peers/llama.cpp; needs cmake, a C++ compiler and pip)
set -euo pipefail
version=0.3.36
here=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-$here/.peers/llama.cpp}
mkdir -p "$target"
cd "$target"
python=$here/.venv/bin/python
export PATH=$here/.venv/bin:$PATH
if [ ! -d "llama_cpp_python-$version" ]; then
  "$python" -m pip download -q --no-deps --no-binary :all: -d . "llama-cpp-python==$version"
  tar xf "llama_cpp_python-$version.tar.gz"
fi
cmake -S "llama_cpp_python-$version/vendor/llama.cpp" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF
cmake --build build -j "${JOBS:-$(nproc)}" --target llama-server llama-bench llama-quantize llama-tokenize llama-perplexity
echo "$target/build/bin/llama-server"
