#!/usr/bin/env bash
# The kernel tests under sanitizers, in copies of the package that nothing else uses.
#
#   scripts/sanitize.sh [address|thread]...     default: both
#
# address: ASan and UBSan, every ISA level of this machine, tests/test_kernels.py and tests/test_ops_edges.py.
# thread: TSan over the op on three threads, with calls from several Python threads (tests/tsan_calls.py).
# Needs the test extras, g++ and cmake in the environment; takes some minutes. Stops at the first report.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

build() { # name, -fsanitize=
  local copy=$root/build/sanitize-$1
  rm -rf "$copy" && mkdir -p "$copy/objects"
  cp -r "$root/ktft" "$root/tests" "$root/pyproject.toml" "$copy/"
  rm -f "$copy"/ktft/_C*.so
  cmake -S "$root/csrc" -B "$copy/objects" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKTFT_SANITIZE="$2" \
    -DPython_EXECUTABLE="$($python -c 'import sys; print(sys.executable)')" \
    -Dpybind11_DIR="$($python -m pybind11 --cmakedir)" > "$copy/cmake.log"
  cmake --build "$copy/objects" -j "$(nproc)" >> "$copy/cmake.log"
  cp "$copy"/objects/_C*.so "$copy/ktft/"
  cd "$copy"
}

for which in "${@:-address thread}"; do
  for kind in $which; do
    case $kind in
      address)
        build address address,undefined
        # Python itself leaks by design and was not built with ASan, so its library comes first.
        LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
          ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
          PYTHONPATH=$PWD $python -m pytest -q -x -p no:cacheprovider tests/test_kernels.py tests/test_ops_edges.py
        ;;
      thread)
        build thread thread
        # Only reports that pass through the extension count: torch and Python are not built with TSan.
        printf 'race:libtorch\nrace:libgomp\nrace:libpython\ncalled_from_lib:libtorch_cpu.so\n' > suppressions
        LD_PRELOAD="$(g++ -print-file-name=libtsan.so)" OMP_NUM_THREADS=1 \
          TSAN_OPTIONS=halt_on_error=1:suppressions=suppressions:ignore_noninstrumented_modules=1 \
          PYTHONPATH=$PWD $python tests/tsan_calls.py
        ;;
      *) echo "sanitize.sh: $kind is not a sanitizer; valid: address, thread" >&2; exit 2 ;;
    esac
    echo "sanitize.sh: $kind: clean"
  done
done
