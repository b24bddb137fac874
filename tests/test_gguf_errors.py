"""GGUF files and directories that are refused, and by what words; nothing is loaded before."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from ktft import cli
from ktft.checkpoint import Checkpoint
from ktft.expert_layout import Tensor
from ktft.families import UnsupportedModelError
from ktft.mapping import CheckpointError
from ktft.model import load_model
from tests.gguf_files import SMALL, write


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return write("qwen3_moe", tmp_path_factory.mktemp("good"), "Q8_0", **SMALL).path


@pytest.fixture
def file(good: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copy(good, tmp_path / "m.gguf"))


def refused(path: Path, message: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=message):
        load_model(path)


def change(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def test_no_gguf_file(file: Path) -> None:
    change(file, 0, b"GGML")
    refused(file, r"m\.gguf is not a GGUF file: it begins with b'GGML', expected b'GGUF'")


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "GGUF version 1; expected 2 or 3"), (7, "version 7"), (3 << 24, "big-endian; expected little-endian")],
)
def test_versions(file: Path, version: int, message: str) -> None:
    change(file, 4, struct.pack("<I", version))
    refused(file, message)


def test_big_endian_by_the_packages_writer(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen3moe", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "is big-endian")


def test_truncated_anywhere(file: Path) -> None:
    size = file.stat().st_size
    header = min(tensor.data_offset for tensor in gguf.GGUFReader(file).tensors)
    whole = file.read_bytes()
    for length in (size - 1, header + 100):
        file.write_bytes(whole[:length])
        refused(file, rf"is truncated: tensor '[a-z.0-9_]+' ends at byte \d+, the file has {length}; download it again")
    for length in (5, 23, 24, 100, header // 2, header - 40):
        file.write_bytes(whole[:length])
        refused(
            file, rf"is truncated: its header goes on after its {length} bytes|claims \d+ .*, more than its {length}"
        )
    file.write_bytes(b"")
    refused(file, "is not a GGUF file")


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "metadata pairs")])
def test_numbers_that_no_file_can_have(file: Path, at: int, what: str) -> None:
    change(file, at, struct.pack("<Q", 2**62))
    refused(file, rf"is damaged: it claims {2**62} {what}, more than its \d+ bytes can hold")


def test_data_beyond_or_upon_other_data(file: Path) -> None:
    reader = gguf.GGUFReader(file)
    first, last = reader.tensors[0], reader.tensors[-1]
    offset = last.field.offset + sum(int(part.nbytes) for part in last.field.parts) - 8
    change(file, offset, struct.pack("<Q", 2**40))
    refused(file, f"is truncated: tensor '{last.name}' ends at byte")
    change(file, offset, struct.pack("<Q", 0))
    refused(file, f"tensor '({first.name}|{last.name})' begins where '({first.name}|{last.name})' has not ended")
    change(file, offset, struct.pack("<Q", 7))
    refused(file, f"tensor '{last.name}' begins at data byte 7, no multiple of 32")


def test_types_that_are_not_known(file: Path) -> None:
    last = gguf.GGUFReader(file).tensors[-1]
    kind = last.field.offset + sum(int(part.nbytes) for part in last.field.parts) - 12
    change(file, kind, struct.pack("<I", 250))
    refused(file, f"tensor '{last.name}' is stored as type number 250, which the installed gguf package does not know")
    change(file, kind, struct.pack("<I", int(GGMLQuantizationType.I32)))
    refused(file, f"tensor '{last.name}' is stored as I32; expected one of BF16, F16, F32, Q8_0")


@pytest.mark.parametrize("kind", ["Q5_K", "IQ4_XS", "Q2_K"])
def test_types_that_experts_are_not_computed_in(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    written = write("qwen3_moe", tmp_path, "BF16", types={"1.ffn_down_exps": kind}, **sizes)
    refused(
        written.path,
        rf"m\.gguf: expert tensor 'blk\.1\.ffn_down_exps\.weight' is stored as {kind.lower()}, which ktft does not "
        r"compute with; expected bf16, .*q8_0, q4_0, q4_1, q4_k, q6_k, gguf_mxfp4",
    )


def test_architectures(tmp_path: Path) -> None:
    for architecture, key, message in (
        ("qwen3next", "expert_count", "architecture 'qwen3next'; of GGUF files ktft reads qwen3moe, qwen2moe, olmoe"),
        ("llama", "context_length", r"\(llama\) has no experts: it is not a Mixture-of-Experts model"),
    ):
        writer = GGUFWriter(tmp_path / "m.gguf", architecture)
        writer.add_uint32(f"{architecture}.{key}", 4)
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        refused(tmp_path / "m.gguf", message, UnsupportedModelError)


def test_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    refused(tmp_path / "m.gguf", "has no general.architecture among its metadata")


def replace(writer: GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def test_metadata_that_is_not_understood(tmp_path: Path) -> None:
    written = write("qwen3_moe", tmp_path, edit=lambda w: w.add_uint32("qwen3moe.attention.sliding_window", 8))
    refused(
        written.path,
        rf"not known here what qwen3moe\.attention\.sliding_window mean; put the config\.json of the model's "
        rf"safetensors checkpoint into {re.escape(str(tmp_path))}",
    )
    write("qwen3_moe", tmp_path, edit=lambda w: w.add_rope_dimension_count(6))
    refused(written.path, r"qwen3moe\.rope\.dimension_count is 6, expected 12")
    write("qwen3_moe", tmp_path, edit=lambda w: w.add_string("qwen3moe.rope.scaling.type", "longrope"))
    refused(written.path, r"what qwen3moe\.rope\.scaling\.type mean")
    # llama.cpp multiplies YaRN's own factor by this one, transformers' attention_factor takes its place
    write("qwen3_moe", tmp_path, edit=lambda w: w.add_float32("qwen3moe.rope.scaling.attn_factor", 1.0))
    refused(written.path, r"what qwen3moe\.rope\.scaling\.attn_factor mean")
    for key, value, message in (
        ("qwen3moe.attention.head_count", [4, 4], r"head_count: expected a positive number, found \[4, 4\]"),
        ("qwen3moe.attention.head_count_kv", 0, "head_count_kv: expected a positive number, found 0"),
        ("split.no", "0", r"split\.no: expected a whole number, found '0'"),
    ):
        write("qwen3_moe", tmp_path, edit=lambda w, key=key, value=value: replace(w, key, value))
        refused(written.path, message)
    write("qwen3_moe", tmp_path, edit=lambda w: w.kv_data[0].pop("qwen3moe.expert_feed_forward_length"))
    refused(written.path, r"has no qwen3moe\.expert_feed_forward_length among its metadata")


def test_families_that_need_their_config(tmp_path: Path) -> None:
    written = write("deepseek_v3", tmp_path)
    (tmp_path / "config.json").unlink()
    refused(written.path, r"the metadata of deepseek2 files is not read; put the config\.json")


def test_the_config_of_another_model(good: Path, tmp_path: Path) -> None:
    written = write("mixtral", tmp_path)
    config = json.loads(written.stock.config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    refused(written.path, "architecture 'llama', but config.json beside it says model_type 'qwen3_moe'")
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    refused(written.path, r"tensor 'token_embd\.weight': expected shape \[96, 48\] by the config, found \[96, 40\]")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    refused(written.path, r"expected shape \[4, 40\]")
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 20}))
    refused(written.path, r"tensor 'blk\.0\.ffn_gate_exps\.weight': expected shape \[5, 20, 40\] by the config")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    refused(written.path, r"tensors the model has no use for \['blk\.1\.")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(
        written.path, r"model\.layers\.2\.mlp\.experts: expected blk\.2\.ffn_gate_exps\.weight, .*, found none of them"
    )


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_up_exps.weight", "output_norm.weight"])
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    written = write("qwen3_moe", tmp_path, edit=lambda w: w.tensors[0].pop(name))
    what = "missing: up of all experts" if "exps" in name else f"has no tensor '{name}'; the file is incomplete"
    refused(written.path, what)


def test_a_repository_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktft.model.snapshot_download", lambda *args, **kwargs: str(tmp_path))
    with pytest.raises(ValueError, match=r"^a/b has no config\.json\. Of a repository of GGUF files download the one"):
        load_model("a/b")


def test_parts(tmp_path: Path) -> None:
    written = write("qwen3_moe", tmp_path, "Q8_0", parts=7, **SMALL)
    second = sorted(tmp_path.iterdir())[1]
    moved = second.with_name("elsewhere")
    second.rename(moved)
    for path in (written.path, tmp_path):
        refused(path, rf"is one part of a model, of which {second.name} is missing beside it")
    moved.rename(second)
    lone = second.with_name("lone.gguf")
    shutil.copy(second, lone)
    refused(lone, r"lone\.gguf says that it is part 2 of \d; by its name it is 1 of 1")


def test_paths(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", "is not a directory; expected a directory .*, or a .gguf file", ValueError)
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    refused(tmp_path / "m.bin", "is not a directory", ValueError)
    with pytest.raises(ValueError, match="revision='main' has no meaning for the local path"):
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        load_model(tmp_path / "m.gguf", revision="main")


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.weight"])
def test_what_cannot_be_read_is_said_in_words_of_ours(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has other words for whatever goes wrong while it loads a tensor."""
    read = Checkpoint.read

    def failing(self: Checkpoint, tensor: Tensor) -> torch.Tensor:
        if tensor.name == name:
            raise CheckpointError(f"{tensor.file} was truncated while it was being loaded")
        return read(self, tensor)

    monkeypatch.setattr(Checkpoint, "read", failing)
    refused(file, r"^\S+m\.gguf was truncated while it was being loaded$")


def test_convert_reads_safetensors_only(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(good.parent), str(tmp_path / "out"), "--format", "int8"]) == 1
    assert f"{good.parent} holds a GGUF model; expected a directory with config.json" in capsys.readouterr().err


def test_values_that_are_not_finite(file: Path) -> None:
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up_exps.weight")
    row_bytes = 64 // 32 * 34
    change(file, tensor.data_offset + (2 * 32 + 3) * row_bytes + 34, b"\x00\x7c")
    load_model(file)
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.1\.ffn_up_exps\.weight': the weight at row 3, column 32"):
        load_model(file, check_weights=True)
