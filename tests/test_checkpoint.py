"""Headers, mappings, addresses: what is in the file is what the kernels see, and every damaged file is named."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ktft.checkpoint import Checkpoint, CheckpointError, ExpertTensor, read_header, weight_files
from ktft.mapping import is_mapped_source, refuse_if_mapped, replacing
from ktft.weights import ExpertWeights

E, H, I = 3, 10, 6  # noqa: E741
PREFIX = "model.layers.0.mlp.experts"
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
Matrices = dict[str, torch.Tensor]


def random_experts(dtype: torch.dtype = torch.bfloat16, e: int = E, h: int = H, i: int = I) -> Matrices:
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def per_expert(experts: Matrices) -> tuple[Matrices, list[ExpertTensor]]:
    tensors, parts = {}, []
    for name, stacked in experts.items():
        for e in range(len(stacked)):
            key = f"{PREFIX}.{e}.{name}_proj.weight"
            tensors[key] = stacked[e].clone()
            parts.append(ExpertTensor(key, name, e))  # type: ignore[arg-type]
    return tensors, parts


def fused(experts: Matrices, transposed: bool) -> tuple[Matrices, list[ExpertTensor]]:
    tensors = {"gate_up": torch.cat([experts["gate"], experts["up"]], dim=1), "down": experts["down"]}
    if transposed:
        tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
    keyed = {f"{PREFIX}.{name}_proj": tensor.contiguous() for name, tensor in tensors.items()}
    return keyed, [ExpertTensor(f"{PREFIX}.{name}_proj", name, None) for name in tensors]  # type: ignore[arg-type]


def write(
    path: Path, tensors: Matrices, *, pad: int = 0, change: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """A safetensors file by hand: ``pad`` spaces after the header shift the data, ``change`` edits the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    if change is not None:
        change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def open_weights(directory: Path, parts: list[ExpertTensor], e: int = E, h: int = H, i: int = I) -> ExpertWeights:
    return Checkpoint(directory).expert_weights(PREFIX, parts, num_experts=e, hidden_size=h, intermediate_size=i)


def assert_same(weights: ExpertWeights, experts: Matrices) -> None:
    for name, stacked in experts.items():
        for e in range(len(stacked)):
            found = weights.matrix(name, e)
            assert found.dtype == stacked.dtype
            assert torch.equal(found, stacked[e]), (name, e)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["per_expert", "fused", "transposed"])
def test_every_layout_gives_the_same_matrices(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    experts = random_experts(dtype)
    tensors, parts = per_expert(experts) if layout == "per_expert" else fused(experts, layout == "transposed")
    save_file({"model.embed_tokens.weight": torch.ones(7), **tensors}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path, parts)
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (E, H, I)
    assert weights.down.transposed == (layout == "transposed")
    assert_same(weights, experts)


@pytest.mark.parametrize(("h", "i"), [(8, 4), (6, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_that_look_the_same_both_ways(tmp_path: Path, h: int, i: int, transposed: bool) -> None:
    """2I = H makes gate_up ambiguous, I = H makes down ambiguous; the other of the pair tells."""
    experts = random_experts(h=h, i=i)
    tensors, parts = fused(experts, transposed)
    write(tmp_path / "model.safetensors", tensors)
    weights = open_weights(tmp_path, parts, h=h, i=i)
    assert weights.gate.transposed == transposed
    assert_same(weights, experts)


@pytest.mark.parametrize("pad", [0, 2, 4, 8, 14])
@pytest.mark.parametrize("layout", ["per_expert", "fused", "transposed"])
def test_unaligned_data(tmp_path: Path, layout: str, pad: int) -> None:
    experts = random_experts()
    tensors, parts = per_expert(experts) if layout == "per_expert" else fused(experts, layout == "transposed")
    write(tmp_path / "model.safetensors", tensors, pad=pad)
    weights = open_weights(tmp_path, parts)
    assert int(weights.gate.addresses[0]) % 8 == pad % 8
    assert_same(weights, experts)


@pytest.mark.parametrize(("dtype", "pad"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_data_not_aligned_to_an_element_is_refused(tmp_path: Path, dtype: torch.dtype, pad: int) -> None:
    tensors, parts = per_expert(random_experts(dtype))
    write(tmp_path / "model.safetensors", tensors, pad=pad)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expert tensor .* begins at byte"):
        open_weights(tmp_path, parts)


def test_one_layer_across_shards(tmp_path: Path) -> None:
    experts = random_experts()
    tensors, parts = per_expert(experts)
    weight_map = {}
    for n, (key, tensor) in enumerate(tensors.items()):
        shard = f"model-{n % 4}.safetensors"
        weight_map[key] = shard
        tensors[key] = tensor
    for shard in set(weight_map.values()):
        write(tmp_path / shard, {key: tensors[key] for key, where in weight_map.items() if where == shard})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(open_weights(tmp_path, parts), experts)


# --- damage -----------------------------------------------------------------------------------------------------------


def expert_entry(name: str = "gate", e: int = 1) -> str:
    return f"{PREFIX}.{e}.{name}_proj.weight"


def set_entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[expert_entry()].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_entry(shape=[H, I]),
            r"model\.safetensors: tensor .*1\.gate_proj.* expected shape \[6, 10\].*found \[10, 6\]",
        ),
        (
            set_entry(dtype="F16"),
            r"model\.safetensors: tensor .*1\.gate_proj.* expected dtype BF16 like .*0\.gate_proj.*found F16",
        ),
        (set_entry(dtype="F8_E4M3", shape=[2 * I, H]), r"no quantization_config.* .*1\.gate_proj.*F8_E4M3"),
        (set_entry(dtype="F32", shape=[I, H // 2]), r"1\.gate_proj"),
        (set_entry(dtype="NEW9"), r"1\.gate_proj.* expected dtype BF16 or F16 or F32, found NEW9"),
        (set_entry(shape=[I, H + 1]), r"1\.gate_proj.* expected data_offsets spanning the 132 bytes"),
        (set_entry(shape=[-I, -H]), r"1\.gate_proj.* expected a shape of non-negative integers"),
        (set_entry(shape=[I, True]), r"1\.gate_proj.* expected a shape of non-negative integers"),
        (set_entry(shape="big"), r"1\.gate_proj.* expected a shape"),
        (set_entry(data_offsets=[0]), r"1\.gate_proj.* expected data_offsets"),
        (set_entry(data_offsets=[120, 0]), r"1\.gate_proj.* expected data_offsets"),
        (set_entry(data_offsets=[2**70, 2**70 + 120]), r"1\.gate_proj.* expected data_offsets"),
        (set_entry(data_offsets=[10**6, 10**6 + 120]), r"truncated: tensor .*1\.gate_proj.* ends at byte"),
        (set_entry(data_offsets=[60, 180]), r"begins at data byte"),
        (set_entry(dtype=None), r"1\.gate_proj.* expected an object with dtype"),
        (lambda header: header.update({expert_entry(): []}), r"1\.gate_proj.* expected an object"),
        (lambda header: header.pop(expert_entry("down", E - 1)), r"the tensors end at byte"),
    ],
)
def test_wrong_headers_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    tensors, parts = per_expert(random_experts())
    write(tmp_path / "model.safetensors", tensors, change=change)
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path, parts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x01\x02", "truncated"),
        ((10**12).to_bytes(8, "little") + b"{}", "its header claims 1000000000000 bytes"),
        ((50).to_bytes(8, "little") + b"{}", "its header claims 50 bytes, the file has 10"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not valid JSON"),
        ((4).to_bytes(8, "little") + b"{,,}", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "must be a JSON object"),
        ((12).to_bytes(8, "little") + b'{"a":1,"a":2', "not valid JSON"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":2}', "'a' appears twice"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not valid JSON"),
    ],
)
def test_garbage(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor .*2\.down_proj.* ends at byte"):
        open_weights(tmp_path, parts)


def test_trailing_bytes_are_an_error(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    write(tmp_path / "model.safetensors", tensors)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="but the file has"):
        open_weights(tmp_path, parts)


def test_missing_extra_and_double_experts(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    fused_tensors, fused_parts = fused(random_experts(), False)
    write(tmp_path / "model.safetensors", {**tensors, **fused_tensors, "again": tensors[expert_entry()]})
    lacking = [part for part in parts if part.key != expert_entry("down", 2)]
    with pytest.raises(CheckpointError, match=r"expected 3 tensors for down, found 2; missing: down of experts \[2\]"):
        open_weights(tmp_path, lacking)
    with pytest.raises(CheckpointError, match=r"2\.gate_proj.* belongs to expert 2; expected experts 0 to 1"):
        open_weights(tmp_path, parts, e=2)
    with pytest.raises(CheckpointError, match=r"'again' is gate of .*, expert 1, and so is .*1\.gate_proj"):
        open_weights(tmp_path, [*parts, ExpertTensor("again", "gate", 1)])
    with pytest.raises(CheckpointError, match="both per-expert and fused"):
        open_weights(tmp_path, parts + fused_parts)
    with pytest.raises(CheckpointError, match="missing: down of all experts"):
        open_weights(tmp_path, fused_parts[:1])
    with pytest.raises(CheckpointError, match=r"expected shapes \[3, 14, 10\] and \[3, 10, 7\] or"):
        open_weights(tmp_path, fused_parts, i=7)
    with pytest.raises(CheckpointError, match=r"expected shapes \[4, 12, 10\]"):
        open_weights(tmp_path, fused_parts, e=4)


def test_directories_and_indices(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"weight files found: \['pytorch_model.bin'\]"):
        Checkpoint(tmp_path)
    write(tmp_path / "a.safetensors", {"x": torch.ones(2), "y": torch.ones(3)})
    index = tmp_path / "model.safetensors.index.json"

    def with_map(weight_map: object) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    with_map({"x": "a.safetensors", "y": "a.safetensors"})
    assert set(Checkpoint(tmp_path).tensors) == {"x", "y"}
    for weight_map, message in (
        ({"x": "a.safetensors", "z": "a.safetensors"}, "says tensor 'z' is in a.safetensors; it is in no file"),
        ({"x": "b.safetensors"}, "names b.safetensors, which does not exist"),
        ({"x": "../a.safetensors"}, "expected a file inside the directory"),
        ({"x": str(tmp_path / "a.safetensors")}, "expected a file inside the directory"),
        ({"x": 3}, "expected a file inside the directory"),
        ({}, "expected 'weight_map' to map"),
        ([], "expected 'weight_map' to map"),
    ):
        with_map(weight_map)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Checkpoint(tmp_path)
    write(tmp_path / "b.safetensors", {"x": torch.ones(2)})
    with_map({"x": "b.safetensors", "y": "a.safetensors"})
    with pytest.raises(CheckpointError, match="tensor 'x' is in two files"):
        Checkpoint(tmp_path)
    write(tmp_path / "b.safetensors", {"z": torch.ones(2)})
    with_map({"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"says tensor 'x' is in b\.safetensors; it is in a\.safetensors"):
        Checkpoint(tmp_path)


def test_names_of_weight_files_before_they_are_there(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == ["model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "in/a.safetensors", "z": "b.safetensors"}}))
    assert weight_files(tmp_path) == ["b.safetensors", "in/a.safetensors"]
    index.write_text(json.dumps({"weight_map": {"x": "../b.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected a file inside the directory"):
        weight_files(tmp_path)


# --- mappings ---------------------------------------------------------------------------------------------------------


def test_two_loads_share_one_mapping_and_it_ends_with_the_last(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    link = tmp_path / "link"
    link.mkdir()
    (link / "model.safetensors").symlink_to(path)
    first, second = open_weights(tmp_path, parts), open_weights(link, parts)
    assert (first.gate.addresses == second.gate.addresses).all()
    mapped = f"{path}\n"
    assert mapped in Path("/proc/self/maps").read_text()
    del first
    gc.collect()
    assert is_mapped_source(path)
    assert_same(second, random_experts())
    del second
    gc.collect()
    assert not is_mapped_source(path)
    assert mapped not in Path("/proc/self/maps").read_text()


def test_the_mapping_is_shared_and_read_only(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    write(tmp_path / "model.safetensors", tensors)
    weights = open_weights(tmp_path, parts)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert [line.split()[1] for line in lines] == ["r--s"]
    del weights


@pytest.mark.parametrize("how", ["touch", "grow", "replace"])
def test_a_file_changed_under_a_model_is_an_error_at_the_next_load(tmp_path: Path, how: str) -> None:
    tensors, parts = per_expert(random_experts())
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    weights = open_weights(tmp_path, parts)
    if how == "touch":
        os.utime(path, ns=(1, 1))
    elif how == "grow":
        with path.open("ab") as file:
            file.write(b"12345678")
    else:
        other = tmp_path / "other"
        shutil.copy(path, other)
        os.replace(other, path)
    with pytest.raises(CheckpointError, match="changed while a model of this process is mapped onto it"):
        open_weights(tmp_path, parts)
    del weights
    gc.collect()
    if how != "grow":
        assert_same(open_weights(tmp_path, parts), random_experts())


def test_a_file_that_changes_while_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    checkpoint = Checkpoint(tmp_path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        checkpoint.expert_weights(PREFIX, parts, num_experts=E, hidden_size=H, intermediate_size=I)
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        checkpoint.verify_unchanged()
    path.unlink()
    with pytest.raises(CheckpointError, match="vanished"):
        checkpoint.verify_unchanged()


def test_writing_onto_a_mapped_file_is_refused(tmp_path: Path) -> None:
    tensors, parts = per_expert(random_experts())
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    (tmp_path / "hard").hardlink_to(path)
    (tmp_path / "soft").symlink_to(path)
    refuse_if_mapped(path)
    weights = open_weights(tmp_path, parts)
    for name in ("model.safetensors", "hard", "soft"):
        with pytest.raises(ValueError, match=r"writing onto .* is refused"):
            refuse_if_mapped(tmp_path / name)
        with pytest.raises(ValueError, match=r"writing onto .* is refused"), replacing(tmp_path / name):
            raise AssertionError("never reached")
    refuse_if_mapped(tmp_path / "new")
    assert_same(weights, random_experts())


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="half-way"), replacing(target) as temporary:
        temporary.write_text("ne")
        raise RuntimeError("half-way")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert target.read_text() == "old"
    with replacing(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_mapping_reads_nothing(tmp_path: Path) -> None:
    """A sparse file of 8 GB, more than a test may use: mapping it costs neither memory nor time."""
    script = f"""
import json, resource
from pathlib import Path
from ktft.checkpoint import Checkpoint, ExpertTensor
e, h, i = 4, 4096, 87381
size = 2 * i * h
names = [(p, x) for p in ("gate", "up", "down") for x in range(e)]
shapes = {{"gate": [i, h], "up": [i, h], "down": [h, i]}}
header = {{f"{{p}}.{{x}}": {{"dtype": "BF16", "shape": shapes[p], "data_offsets": [n * size, (n + 1) * size]}}
          for n, (p, x) in enumerate(names)}}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
path = Path({str(tmp_path)!r}) / "model.safetensors"
with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + 12 * size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
parts = [ExpertTensor(f"{{p}}.{{x}}", p, x) for p, x in names]
weights = Checkpoint(path.parent).expert_weights("x", parts, num_experts=e, hidden_size=h, intermediate_size=i)
assert path.stat().st_size > 8e9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000  # KiB
