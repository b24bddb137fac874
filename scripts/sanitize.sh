#!/usr/bin/env bash
# The kernel tests under sanitizers, in copies of the package that nothing else uses.
#
#   scripts/sanitize.sh [address|thread]...     default: both
#
# address: ASan and UBSan, every ISA level of this machine, tests/test_kernels.py, test_ops.py, test_ops_edges.py and test_coded.py.
# thread: TSan over the op on three threads, with calls from several Python threads (tests/tsan_calls.py).
# Needs the test extras, pybind11, g++ and cmake in the environment; takes some minutes. Stops at the first report: exit status 1.
# Exit status 3, before anything is built: this machine cannot run a sanitizer, and why.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

cannot() { # why
  echo "sanitize.sh: not run: $1" >&2
  exit 3
}

# A program that does nothing, under the same sanitizers: is the library there, does the kernel lay out memory as it wants?
check() { # -fsanitize=
  local scratch output
  scratch=$(mktemp -d)
  echo 'int main() { return 0; }' > "$scratch/nothing.cpp"
  if ! output=$(g++ -fsanitize="$1" "$scratch/nothing.cpp" -o "$scratch/nothing" 2>&1 && "$scratch/nothing" 2>&1); then
    rm -rf "$scratch"
    cannot "an empty program fails under -fsanitize=$1: $(head -n 3 <<< "$output" | tr '\n' ' ')"
  fi
  rm -rf "$scratch"
  command -v cmake > /dev/null || cannot "no cmake on the path (Debian: apt-get install cmake)"
  $python -c "import pybind11, pytest, torch" 2> /dev/null || cannot "$python lacks pybind11, pytest or torch"
}

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
  # An editable install sends "import ktft" to its own extension, whatever the path says.
  echo 'import sys; sys.meta_path = [f for f in sys.meta_path if "_editable" not in type(f).__module__]' > sitecustomize.py
  PYTHONPATH=$PWD $python -c '
import importlib.util, os, sys
found = importlib.util.find_spec("ktft._C").origin
sys.exit(not found.startswith(os.getcwd()) and f"sanitize.sh: Python would load {found}, not the one in {os.getcwd()}")'
}

[ $# -gt 0 ] || set -- address thread
for kind in "$@"; do
  case $kind in
    address) check address,undefined ;;
    thread) check thread ;;
    *) echo "sanitize.sh: $kind is not a sanitizer; valid: address, thread" >&2; exit 2 ;;
  esac
done

for kind in "$@"; do
  if [ "$kind" = address ]; then
    build address address,undefined
    # Python itself leaks by design and was not built with ASan, so its library comes first. The report goes past Python to the
    # process's standard error, which pytest must not capture.
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
      ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
      PYTHONPATH=$PWD $python -m pytest -q -x --capture=sys -p no:cacheprovider \
      tests/test_kernels.py tests/test_ops.py tests/test_ops_edges.py tests/test_coded.py
  else
    build thread thread
    # Only reports that pass through the extension count: torch and Python are not built with TSan.
    printf 'race:libtorch\nrace:libgomp\nrace:libpython\ncalled_from_lib:libtorch_cpu.so\n' > suppressions
    LD_PRELOAD="$(g++ -print-file-name=libtsan.so)" OMP_NUM_THREADS=1 \
      TSAN_OPTIONS=halt_on_error=1:suppressions=suppressions:ignore_noninstrumented_modules=1 \
      PYTHONPATH=$PWD $python tests/tsan_calls.py
  fi
  echo "sanitize.sh: $kind: clean"
done
