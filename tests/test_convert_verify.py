"""``ktft convert --verify``: what must be found, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktft import cli, formats
from ktft.convert import convert, verify
from tests.quantised import SIZES, write
from tests.tiny_models import tiny_checkpoint

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
NAME = "model.layers.1.mlp.experts.2.up"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    directory = tmp_path_factory.mktemp("verify") / "source"
    tiny_checkpoint("qwen3_moe", directory, initializer_range=0.06, **SIZES["whole"]["qwen3_moe"])
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def results(original: Path) -> dict[str, Path]:
    """Of every format; not to be changed."""
    out = {name: original.with_name(name) for name in formats.WRITTEN}
    for name, directory in out.items():
        convert(original, directory, name)
    return out


@pytest.mark.parametrize("name", formats.WRITTEN)
def test_what_convert_writes_is_within_half_a_step(
    original: Path, results: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", "--verify", str(original), str(results[name])]) == 0
    out = capsys.readouterr().out
    assert "20 parameters equal, 36 within half a step\nlargest relative error " in out
    found = verify(original, results[name])
    weight = load_file(original / "model.safetensors")[f"{EXPERT}.weight"]
    encoding = formats.WRITTEN[name]
    decoded = formats.dequantize(encoding, formats.encode(weight, encoding), torch.float32)
    one = found.coded[NAME]
    assert one.relative == pytest.approx(formats.relative_error(weight, decoded))
    assert one.relative < one.allowed < 4 * one.relative
    assert 0.9 < one.steps <= 1


def one_code(tensors: Tensors) -> None:
    """The lowest bits of one byte of codes: 1 up or down, where the code allows it."""
    codes = next(tensors[name] for name in (f"{EXPERT}.weight_packed", f"{EXPERT}.weight") if name in tensors)
    byte = codes.view(torch.uint8)[3, 7:8]
    byte.copy_(torch.where(byte & 7 < 4, byte + 2, byte - 2))


def one_scale(tensors: Tensors) -> None:
    scales = next(tensors[key] for key in (f"{EXPERT}.weight_scale", f"{EXPERT}.weight_scale_inv") if key in tensors)
    scales.view(-1)[0] = scales.view(-1)[0] + 1 if scales.dtype == torch.uint8 else scales.view(-1)[0] * 2


def swapped(tensors: Tensors) -> None:
    """Experts 2 and 3."""
    for key in [key for key in tensors if key.startswith(EXPERT)]:
        other = key.replace("experts.2", "experts.3")
        tensors[key], tensors[other] = tensors[other], tensors[key]


@pytest.mark.parametrize("name", formats.WRITTEN)
@pytest.mark.parametrize("damage", [one_code, one_scale, swapped])
def test_damaged_experts_are_named(
    original: Path,
    results: dict[str, Path],
    tmp_path: Path,
    name: str,
    damage: Callable[[Tensors], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = Path(shutil.copytree(results[name], tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    damage(tensors)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    found = verify(original, damaged)
    assert set(found.beyond) == ({NAME, NAME.replace("2.up", "3.up")} if damage is swapped else {NAME})
    capsys.readouterr()
    assert cli.main(["convert", "--verify", str(original), str(damaged)]) == 1
    out, error = capsys.readouterr()
    assert f"{36 - len(found.beyond)} within half a step" in out
    assert error.startswith("ktft: error: verification failed: ")
    assert f"{len(found.beyond)} of 36 coded matrices differ by more than half a step" in error
    assert "the worst is model.layers.1.mlp.experts." in error


def lose(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.more.weight"] = torch.ones(2, 2)


def change(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.gate.weight"][1, 2] += 0.01


def cast(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, "'model.norm.weight' of .*source is missing in .*damaged"),
        (add, "'model.more.weight' of .*damaged is not in .*source"),
        (change, "model.layers.0.mlp.gate.weight should be the same numbers in both, and is not"),
        (cast, "model.norm.weight should be the same numbers"),
    ],
)
def test_everything_else_has_to_be_the_same(
    original: Path, results: dict[str, Path], tmp_path: Path, damage: Callable[[Tensors], None], message: str
) -> None:
    damaged = Path(shutil.copytree(results["int8"], tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    damage(tensors)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        verify(original, damaged).raise_if_wrong()


def test_files_and_config_have_to_be_the_same(original: Path, results: dict[str, Path], tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(results["int8"], tmp_path / "damaged"))
    (damaged / "tokenizer.json").write_text("[]")
    (damaged / "more.txt").touch()
    config = json.loads((damaged / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (damaged / "config.json").write_text(json.dumps(config))
    problems = "\n".join(verify(original, damaged).problems)
    assert 'config.json differs in ["rms_norm_eps"]' in problems
    assert "more.txt is not in both directories" in problems
    assert "tokenizer.json is not a copy of " in problems
    with pytest.raises(ValueError, match=r"verification failed: .* \(and 2 more\)"):
        verify(original, damaged).raise_if_wrong()


def test_plain_copies_and_decoded_ones_are_equal(original: Path, tmp_path: Path) -> None:
    assert verify(original, original).equal == 20 + 36
    written = write("qwen3_moe", "nvfp4-modelopt", tmp_path, "edges")
    found = verify(written.directory, written.plain)  # in fp32, as decoded
    assert not found.problems and not found.coded
    same = verify(written.directory, written.directory)  # equal numbers need no bound
    assert not same.problems and not same.coded


def test_experts_of_one_side_only(tmp_path: Path) -> None:
    paths = [tiny_checkpoint("mixtral", tmp_path / str(experts), num_local_experts=experts) for experts in (5, 6)]
    assert any("do not have the same experts" in problem for problem in verify(*paths).problems)
