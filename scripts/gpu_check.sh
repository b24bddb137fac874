#!/usr/bin/env bash
# Builds the extension for this machine's python3 and runs the tests that need CUDA, then the op's own tests. Under 8 minutes.
# Needs torch with CUDA, transformers, peft, pytest, pybind11, cmake and a C++17 compiler; installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" - <<'PY'
import torch, transformers, peft, pybind11
print("torch", torch.__version__, "| transformers", transformers.__version__, "| peft", peft.__version__)
assert torch.cuda.is_available(), "no CUDA device"
print(torch.cuda.get_device_name())
PY
build=build/gpu_check
cmake -S csrc -B "$build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" > /dev/null
cmake --build "$build" -j "$(nproc)"
package=$build/package
rm -rf "$package"
mkdir -p "$package"
cp -r ktft tests pyproject.toml csrc "$package/"
rm -f "$package"/ktft/_C*.so
cp "$build"/_C*.so "$package/ktft/"
cd "$package"
"$python" -m pytest -q -m gpu tests/gpu
"$python" -m pytest -q tests/test_kernels.py tests/test_ops.py
