"""``ktft convert`` that is killed, continued, short of disk or memory: its result is there as a whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ktft import cli
from ktft.checkpoint import CheckpointError
from ktft.convert import convert, write
from tests.processes import run_module
from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parent.parent
MIB = 2**20


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of five files and a tokenizer; not to be changed."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "max_shard_size": 60_000}
    path = tiny_checkpoint("mixtral", tmp_path_factory.mktemp("resume") / "source", **sizes)
    (path / "tokenizer.json").write_text("{}")
    for file in path.glob("*.safetensors"):
        # which the library gives in another order each time
        save_file(load_file(file), file, metadata={"format": "pt", **{name: name for name in "bcadfe"}})
    return path


@pytest.fixture(scope="module")
def whole(shards: Path) -> dict[str, bytes]:
    """What an uninterrupted run writes."""
    convert(shards, shards.parent / "whole", "int4-g32")
    return contents(shards.parent / "whole")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "result"


@pytest.fixture
def source(shards: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(shards, tmp_path / "source"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*")}


def partial(target: Path) -> Path:
    return target.with_name("result.partial")


def finished(target: Path) -> dict[str, int]:
    """Names of finished files, and when they were written."""
    names = json.loads((partial(target) / write.MANIFEST).read_text())["finished"]
    return {name: (partial(target) / name).stat().st_mtime_ns for name in names}


KILLED = """
import os, signal, sys
from ktft import cli
from ktft.convert import write
count, original = 0, write._write
def killing(descriptor, offset, data):
    global count
    count += 1
    if count == int(sys.argv[1]):
        original(descriptor, offset, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    original(descriptor, offset, data)
write._write = killing
cli.main(["convert", sys.argv[2], sys.argv[3], "--format", "int4-g32"])
"""


def test_killed_in_the_middle_and_continued(shards: Path, whole: dict[str, bytes], target: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, "60", str(shards), str(target)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert not target.exists()
    before = finished(target)
    names = {name for name in whole if name.endswith(".safetensors")}
    assert 1 <= len(before) < len(names)
    assert [path for path in partial(target).iterdir() if path.suffix == ".part"]  # the file that it was at
    times: dict[str, int] = {}
    rename = write.Partial.rename

    def look(self: write.Partial, to: Path) -> None:
        times.update(finished(target))
        rename(self, to)

    left: list[Path] = []
    write_shard = write.write_shard

    def write_one(path: Path, *others: Any) -> dict[str, float]:
        left.extend(found for found in partial(target).iterdir() if found.suffix == ".part")
        return write_shard(path, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.Partial, "rename", look)
        patch.setattr(write, "write_shard", write_one)
        summary = convert(shards, target, "int4-g32")
    assert not left, "what the killed run had begun still took its room"
    assert times.keys() == names
    assert before.items() <= times.items(), "a finished file was written again"
    assert summary.kept == sum(len(whole[name]) for name in before)
    assert summary.written == sum(len(whole[name]) for name in names - before.keys())
    assert len(summary.errors) == 2 * 5 * 3  # of both runs
    assert contents(target) == whole
    assert not partial(target).exists()


def test_interrupted_anywhere_and_continued(
    shards: Path, whole: dict[str, bytes], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every fifth piece of data, and wherever something is renamed."""
    original, replace, count = write._write, os.replace, 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count % 5 == 0:
            raise KeyboardInterrupt

    def stopping_write(*arguments: Any) -> None:
        stop()
        original(*arguments)

    def stopping_replace(*arguments: Any) -> None:
        if count % 7:
            stop()
        replace(*arguments)

    monkeypatch.setattr(write, "_write", stopping_write)
    monkeypatch.setattr(os, "replace", stopping_replace)
    runs = 0
    while not target.exists():
        runs += 1
        assert runs < 200
        if runs > 40:  # a file has more pieces than are written at a time
            monkeypatch.setattr(write, "_write", original)
        assert cli.main(["convert", str(shards), str(target), "--format", "int4-g32"]) == (
            0 if target.exists() else 130
        )
    assert runs > 40
    assert contents(target) == whole


def test_a_full_disk(
    shards: Path, whole: dict[str, bytes], target: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    allocate, count = os.posix_fallocate, 0

    def full(*arguments: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    arguments = ["convert", str(shards), str(target), "--format", "int4-g32"]
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert "no space left for" in error and "Make room and give the same command again" in error
    assert len(finished(target)) == 2 and not target.exists()
    assert cli.main(arguments) == 0
    assert contents(target) == whole


def begin(source: Path, target: Path) -> None:
    """Convert two files, and stop."""
    add = write.Partial.add

    def stop_after_two(self: write.Partial, *arguments: Any) -> write.Finished:
        out = add(self, *arguments)
        if len(self.finished) == 2:
            raise KeyboardInterrupt
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.Partial, "add", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, "int4-g32")


def test_another_conversion_is_not_continued(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    begin(source, target)
    for name, layers, message in (
        ("int8", None, "format was int4-g32, now it is int8"),
        ("int4-g32", [1], "modules was .*now it is .'model.layers.1.mlp.experts'"),
    ):
        with pytest.raises(ValueError, match=rf"the beginning of another conversion \({message}"):
            convert(source, target, name, layers)
    status = (source / "tokenizer.json").stat()
    (source / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"source: tokenizer\.json changed"):
        convert(source, target, "int4-g32")
    (source / "tokenizer.json").write_text("{}")
    os.utime(source / "tokenizer.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    (partial(target) / write.MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="is not what ktft convert writes"):
        convert(source, target, "int4-g32")
    (partial(target) / write.MANIFEST).unlink()
    with pytest.raises(ValueError, match="is in the way"):
        convert(source, target, "int4-g32")
    shutil.rmtree(partial(target))
    convert(source, target, "int4-g32")
    assert contents(target) == whole


def test_files_that_changed_since_are_written_again(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    begin(source, target)
    first, second = sorted(finished(target))
    (partial(target) / first).unlink()
    with (partial(target) / second).open("ab") as file:
        file.write(b"x")
    summary = convert(source, target, "int4-g32")
    assert summary.kept == 0
    assert contents(target) == whole


def test_a_source_that_changes_meanwhile(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sorted(source.glob("*.safetensors"))[1]
    original = write._write

    def touching(*arguments: Any) -> None:
        original(*arguments)
        if partial(target).is_dir() and len(finished(target)) == 1:
            save_file({n: t + 1 for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
            monkeypatch.setattr(write, "_write", original)

    monkeypatch.setattr(write, "_write", touching)
    with pytest.raises(CheckpointError, match=r"(changed|was truncated) while it was being"):
        convert(source, target, "int4-g32")
    assert len(finished(target)) == 1


def test_one_at_a_time(source: Path, target: Path) -> None:
    begin(source, target)
    descriptor = os.open(partial(target), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another ktft convert is writing"):
        convert(source, target, "int4-g32")
    os.close(descriptor)
    convert(source, target, "int4-g32")


def test_a_directory_that_appears_meanwhile_is_left_alone(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = write._check_result

    def appear(*arguments: Any) -> None:
        check(*arguments)
        target.mkdir()

    monkeypatch.setattr(write, "_check_result", appear)
    with pytest.raises(ValueError, match="exists; remove it"):
        convert(source, target, "int4-g32")
    assert not list(target.iterdir())
    assert partial(target).is_dir()


def test_a_result_that_would_not_load_is_none(shards: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that turn matrices round."""
    original = write.file_header

    def turned(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> Any:
        found = {
            name: (dtype, shape[::-1] if ".experts." in name else shape) for name, (dtype, shape) in tensors.items()
        }
        return original(found, metadata)

    monkeypatch.setattr(write, "file_header", turned)
    with pytest.raises(CheckpointError, match="experts"):
        convert(shards, target, "int4-g32")
    assert not target.exists()


# --- memory


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """Anonymous memory, in a process of its own: experts of 72 MiB in files of 18, converted and verified."""
    (tmp_path / "source").mkdir()
    printed = run_module("tests.convert_memory", str(tmp_path / "source"))
    found = json.loads(printed.splitlines()[-1])
    figures = ", ".join(f"{name} {value / MIB:.1f} MiB" for name, value in found.items())
    print(figures)
    assert found["experts"] == 72 * MIB
    # 8 MiB of what is copied; a matrix is 0.25 MiB in bf16, and some times 0.5 MiB in fp32.
    assert found["convert"] < 18 * MIB, figures
    assert found["verify"] < 18 * MIB, figures
