#!/bin/bash
# The kernels' tests under sanitizers: `make test-asan` (addresses and undefined behaviour), `tools/asan.sh thread` (races).
# Builds csrc/ into build/, loads that in place of the installed module, and stops at the first finding.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=${1:-address}
python=$PWD/.venv/bin/python
tools=$PWD/build/sanitize/tools
module=$PWD/build/sanitize/$sanitizer

if ! "$tools/bin/python" -c "import nanobind" 2>/dev/null; then
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check cmake nanobind ninja
fi
export PATH=$tools/bin:$PATH
flags="-DHR_SANITIZE=ON"
if [ "$sanitizer" = thread ]; then flags="-DCMAKE_CXX_FLAGS=-fsanitize=thread -g"; fi
cmake -S src/headrace/kernels/native -B "$module" -G Ninja -DPython_EXECUTABLE="$tools/bin/python" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo "$flags" >/dev/null
cmake --build "$module"

# The runtime must be there before Python is; libstdc++ too, or exceptions are thrown past the sanitizer.
library=$([ "$sanitizer" = thread ] && echo libtsan.so || echo libasan.so)
preload="$(g++ -print-file-name="$library") $(g++ -print-file-name=libstdc++.so)"
LD_PRELOAD=$preload \
ASAN_OPTIONS=detect_leaks=0 \
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0 \
OPENBLAS_NUM_THREADS=1 \
exec "$python" - "$module"/_native*.so "${@:2}" <<'PYTHON'
import glob
import importlib.util
import sys

name, path = "headrace.kernels.native._native", sys.argv[1]
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])

import headrace.kernels.native
import pytest

headrace.kernels.native._native = sys.modules[name]
tests = sys.argv[2:] or sorted(glob.glob("tests/unit/kernels/test_native_*.py"))
# A finding goes to the real stderr, past pytest's own capture.
sys.exit(pytest.main(["-p", "no:cacheprovider", "--capture=sys", "--timeout=600", *tests]))
PYTHON
