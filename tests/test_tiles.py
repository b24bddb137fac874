"""The AMX level's instructions: their twin in plain C++ against hand-computed and exact values, and the instructions in
the amx object against the twin."""

from __future__ import annotations

import random
import shutil
import signal
import struct
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from ktft import ops

ROOT = Path(__file__).parent.parent
INF, NAN = float("inf"), float("nan")
Matrix = Sequence[Sequence[float]]


@pytest.fixture(scope="session")
def tiles(kernel_objects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/tiles.cpp, compiled."""
    compiler, program = shutil.which("g++"), tmp_path_factory.mktemp("tiles") / "tiles"
    assert compiler, "g++ is needed to compile tests/tiles.cpp"
    sources = [ROOT / "tests/tiles.cpp", ROOT / "csrc/cpu.cpp", *kernel_objects.values()]
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-I", ROOT / "csrc", *sources, "-o", program]
    subprocess.run(command, check=True, timeout=300)
    return program


def bf16(x: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    assert bits & 0xFFFF == 0, f"{x} is not a bf16"
    return bits >> 16


def dot(tiles: Path, c: Matrix, a: Matrix, b: Matrix) -> list[list[float]]:
    """C + A B as the twin's TDPBF16PS computes it: C [M][N], A [M][2 K], B [2 K][N]."""
    m, n, k = len(c), len(c[0]), len(b) // 2
    words_a = [bf16(row[2 * i]) | bf16(row[2 * i + 1]) << 16 for row in a for i in range(k)]
    words_b = [bf16(b[2 * i][j]) | bf16(b[2 * i + 1][j]) << 16 for i in range(k) for j in range(n)]
    data = struct.pack(f"<{m * n}f{m * k + k * n}I", *(x for row in c for x in row), *words_a, *words_b)
    done = subprocess.run(
        [tiles, "dot", str(m), str(n), str(k)], input=data, check=True, capture_output=True, timeout=60
    )
    values = struct.unpack(f"<{m * n}f", done.stdout)
    return [list(values[i * n : i * n + n]) for i in range(m)]


@pytest.mark.parametrize(
    ("c", "a", "b", "expected"),
    [
        pytest.param(0.5, [1, 2, 3, 4], [5, 6, 7, 8], 0.5 + 5 + 12 + 21 + 32, id="plain"),
        # even: 2^24 + 1 ties to 2^24; odd: -2^24 + 1 is exact; one chain over both would give 2
        pytest.param(0.0, [2**24, -(2**24), 1, 1], [1, 1, 1, 1], 1.0, id="two chains"),
        # 2^24 + (1 + 1); adding one after the other to C would leave 2^24
        pytest.param(2.0**24, [1, 1], [1, 1], 2.0**24 + 2, id="C comes last"),
        # -2^127 + 2^64 2^64: the product alone is beyond fp32
        pytest.param(0.0, [-(2.0**127), 0, 2.0**64, 0], [1, 0, 2.0**64, 0], 2.0**127, id="fused"),
        pytest.param(0.0, [2.0**64, 0], [2.0**64, 0], INF, id="overflow"),
        pytest.param(1.0, [2.0**-130, 0], [2.0**120, 0], 1.0, id="denormal element"),
        pytest.param(0.0, [2.0**-130, 1], [1, 2.0**-126], 2.0**-126, id="smallest normal"),
        pytest.param(0.0, [2.0**-70, 0], [2.0**-70, 0], 0.0, id="denormal product"),
        # 2^-126 1.5 - 2^-126 = 2^-127
        pytest.param(0.0, [1.5, 0, -1, 0], [2.0**-126, 0, 2.0**-126, 0], 0.0, id="denormal sum"),
        pytest.param(2.0**-130, [0, 0], [1, 1], 0.0, id="denormal C"),
        pytest.param(-(2.0**-125), [1, 0], [1.5 * 2.0**-126, 0], -0.0, id="denormal result"),
        pytest.param(1.0, [INF, 1], [2, 1], INF, id="infinity"),
        pytest.param(1.0, [INF, 1], [0, 1], NAN, id="infinity times zero"),
        pytest.param(1.0, [NAN, 1], [1, 1], NAN, id="NaN"),
        pytest.param(INF, [-INF, 1], [1, 1], NAN, id="infinities of both signs"),
        pytest.param(3.0, [2.0**-60, 2.0**-56], [2.0**60, 2.0**56], 5.0, id="small times large"),
    ],
)
def test_hand_computed(tiles: Path, c: float, a: list[float], b: list[float], expected: float) -> None:
    """One element at a time, in the corner of a larger tile whose other elements are plain."""
    plain = [1.0] * len(a)
    (first, beside), (below, far) = dot(
        tiles, [[c, 7.0], [7.0, 0.0]], [a, plain], [[x, y] for x, y in zip(b, plain, strict=True)]
    )
    assert struct.pack("<f", first) == struct.pack("<f", expected) or (first != first and expected != expected)
    assert far == len(a), "its neighbours are products of their own"
    assert beside == dot(tiles, [[7.0]], [a], [[x] for x in plain])[0][0] or beside != beside
    assert below == dot(tiles, [[7.0]], [plain], [[x] for x in b])[0][0] or below != below


def to_fp32(x: Fraction) -> Fraction:
    """Round to nearest even in 24 bits; results below 2^-126 are zero."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(x / unit) * unit  # Python rounds halves to even
    return rounded if abs(rounded) >= Fraction(2) ** -126 else Fraction(0)


@pytest.mark.parametrize(
    "exponents", [(-3, 3), (-56, -40), (-64, -60), (-90, 60)], ids=["plain", "small", "tiny", "wide"]
)
def test_against_exact_arithmetic(tiles: Path, exponents: tuple[int, int]) -> None:
    """Whole tiles of random numbers against the pseudocode in rational arithmetic, rounded step by step."""
    generator = random.Random(sum(exponents))

    low, high = exponents

    def matrix(rows: int, columns: int, low: int = low, high: int = high) -> list[list[float]]:
        draw = lambda: generator.choice((-1, 1)) * (1 + generator.randrange(128) / 128)  # noqa: E731
        return [[draw() * 2.0 ** generator.randint(low, high) for _ in range(columns)] for _ in range(rows)]

    for m, n, k in ((16, 16, 16), (5, 3, 7), (1, 16, 2), (16, 1, 16)):
        a, b, c = matrix(m, 2 * k), matrix(2 * k, n), matrix(m, n, max(2 * low, -126), 2 * high)
        actual = dot(tiles, c, a, b)
        for i in range(m):
            for j in range(n):
                chains = [Fraction(0), Fraction(0)]
                for element in range(2 * k):
                    product = Fraction(a[i][element]) * Fraction(b[element][j])
                    chains[element % 2] = to_fp32(chains[element % 2] + product)
                assert actual[i][j] == to_fp32(Fraction(c[i][j]) + to_fp32(chains[0] + chains[1])), (m, n, k, i, j)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unconfigured", "used before they are configured"),
        ("released", "used before they are configured"),
        ("palette", "palette"),
        ("start row", "start row"),
        ("reserved bytes", "reserved"),
        ("rows", "larger than 16 rows of 64 bytes"),
        ("bytes", "larger than 16 rows of 64 bytes"),
        ("rows without bytes", "rows without bytes"),
        ("a ninth tile", "eight tiles"),
        ("rows of C and A", "C and A"),
        ("columns of C and B", "C and B"),
        ("words of A and B", "a row of A"),
        ("half words", "no whole words"),
        ("no shape", "without a shape"),
    ],
)
def test_the_twin_faults_where_the_cpu_does(tiles: Path, name: str, message: str) -> None:
    done = subprocess.run([tiles, "misuse", name], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGABRT and done.stderr.startswith("AMX twin: ") and message in done.stderr


def test_good_use_is_no_fault(tiles: Path) -> None:
    assert subprocess.run([tiles, "misuse", "nothing"], timeout=60).returncode == 0


@pytest.mark.skipif("avx512bf16" not in ops.cpu_report()["levels"], reason="the amx object needs AVX512-BF16 to run")
def test_the_amx_object_computes_what_its_twin_does(tiles: Path) -> None:
    """Bit for bit. Without AMX a signal handler decodes the object's tile instructions and the twin executes them."""
    done = subprocess.run([tiles, "products"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("native\n" if "amx" in ops.cpu_report()["levels"] else "emulated\n")
