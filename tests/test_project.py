"""The tree itself: the wheel works elsewhere, files stay small, nothing unsafe is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for pattern in ("ktft/**/*.py*", "csrc/**/*.*", "tests/**/*.py", "examples/**/*.py", "docs/*.py", "scripts/*")
    for path in ROOT.glob(pattern)
    if path.suffix in (".py", ".pyi", ".cpp", ".h", ".inl", ".sh")
]


def test_no_file_is_above_600_lines() -> None:
    assert len(SOURCES) > 40
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 600}
    assert not long


def test_every_module_opens_with_its_contract() -> None:
    bare = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if p.name not in ("__init__.py",) and p.suffix == ".py" and not p.read_text().startswith('"""')
    ]
    assert not bare


def test_nothing_is_unpickled() -> None:
    for path in (p for p in SOURCES if p.suffix == ".py" and p.is_relative_to(ROOT / "ktft")):
        for line in path.read_text().splitlines():
            assert not re.search(r"\bpickle\.load", line), path
            assert "torch.load(" not in line or "weights_only=True" in line, path


def test_pre_commit_and_ci_run_the_same_linters() -> None:
    """Pre-commit pins each tool; CI takes what the test extra allows. The pin has to be one of those."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = {hook["id"]: repository["rev"] for repository in repositories for hook in repository["hooks"]}
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, extra)}
    ci = (ROOT / ".ci" / "run").read_text()
    for hook, command in {
        "ruff-check": "ruff check",
        "ruff-format": "ruff format",
        "clang-format": "clang-format",
    }.items():
        assert pinned[hook].removeprefix("v") in allowed[command.split()[0]], hook
        assert re.search(rf"(^|\| xargs ){command} ", ci, re.M), command


@pytest.mark.parametrize(
    ("weekday", "wanted", "sanitizers", "status", "ran"),
    [
        (1, None, 0, 0, True),
        (2, None, 0, 0, False),
        (7, None, 0, 0, False),
        (1, "0", 0, 0, False),
        (5, "1", 0, 0, True),
        (1, None, 1, 1, True),  # a report
        (1, None, 3, 0, True),  # not for this machine
    ],
)
def test_ci_runs_the_sanitizers_on_mondays(
    tmp_path: Path, weekday: int, wanted: str | None, sanitizers: int, status: int, ran: bool
) -> None:
    """The step as it stands in .ci/run, with stand-ins for the calendar, pip and the sanitizers."""
    found = re.search(r"^if .*KTFT_WEEKLY.*?^fi$", (ROOT / ".ci" / "run").read_text(), re.M | re.S)
    assert found
    (tmp_path / "scripts").mkdir()
    for name, line in (
        ("date", f'[ "$*" = "-u +%u" ] && echo {weekday}'),
        ("pip", '[ "$*" = "install pybind11" ]'),
        ("scripts/sanitize.sh", f"echo ran; exit {sanitizers}"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "KTFT_WEEKLY"}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}"} | ({"KTFT_WEEKLY": wanted} if wanted else {})
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", found[0] + "\necho end"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, "ran" in result.stdout) == (status, ran), result.stderr
    assert ("end" in result.stdout) == (status == 0)


def test_ci_says_that_emulated_tests_are_skipped(tmp_path: Path) -> None:
    found = re.search(r"^command -v qemu-x86_64.*\n.*$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert found
    for there in (False, True):
        if there:
            (tmp_path / "qemu-x86_64").write_text("#!/bin/sh\n")
            (tmp_path / "qemu-x86_64").chmod(0o755)
        command = ["/bin/bash", "-euo", "pipefail", "-c", found[0] + "\necho end"]
        result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        assert result.returncode == 0 and result.stdout.endswith("end\n"), result.stderr
        assert ("qemu-x86_64 is missing" in result.stdout) != there


def test_a_machine_without_a_sanitizer_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho cannot find -lasan >&2\nexit 1\n")
    compiler.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    script = [ROOT / "scripts" / "sanitize.sh"]
    result = subprocess.run([*script, "address"], env=environment, capture_output=True, text=True)
    assert result.returncode == 3 and "-fsanitize=address,undefined: cannot find -lasan" in result.stderr, result
    result = subprocess.run([*script, "memory"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "memory is not a sanitizer; valid: address, thread" in result.stderr


def check_contents(wheel: Path) -> None:
    """The package, its types and the compiled extension; nothing that only building or testing needs."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    extensions = [name for name in names if name.endswith(".so")]
    assert extensions == [f"ktft/_C{sysconfig.get_config_var('EXT_SUFFIX')}"]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ktft").rglob("*") if path.suffix in (".py", ".pyi")}
    assert {*sources, "ktft/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".inl", ".o", ".a", ".pyc"))]
    (metadata,) = {name.split("/")[0] for name in names} - {"ktft"}
    assert metadata.endswith(".dist-info") and f"{metadata}/licenses/LICENSE" in names


def test_a_wheel_installs_and_works_in_another_environment(tmp_path: Path) -> None:
    """`pip wheel .`, installed into a new environment that has the dependencies but not this checkout."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "-C", f"build-dir={tmp_path / 'build'}", "-w", tmp_path, ROOT]
    result = subprocess.run(build, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("ktft-*.whl")
    check_contents(wheel)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, *pip[1:], "install", "--no-deps", wheel], check=True, timeout=300)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # The dependencies of the running environment, without its own (editable) ktft: nested path files are not run.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    code = (
        "import ktft, torch; from ktft import ops; from ktft.weights import ExpertWeights\n"
        f"assert {str(tmp_path)!r} in ktft.__file__, ktft.__file__\n"
        "eye = torch.eye(8).bfloat16()[None]\n"
        "out = ops.moe_experts(torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1),"
        " ExpertWeights.from_tensors(eye, eye, eye))\n"
        "assert torch.allclose(out, torch.sigmoid(torch.ones(1, 8))); print('works')"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == "works", result.stderr
    command = subprocess.run(
        [tmp_path / "venv/bin/ktft", "version"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert command.returncode == 0 and command.stdout.strip(), command.stderr
