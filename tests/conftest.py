"""Settings for every test, read before torch is imported, and the fixtures that several files share.

Torch is imported inside the fixtures, after the settings.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Torch's OpenMP threads spin while they wait and, where another process is busy, slow tiny models a hundredfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test may reach a model hub by accident.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# --- kernels


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every object of the extension but bindings.cpp's lies, compiled with flags that the baseline takes back."""
    for tool in ("cmake", "objdump", "nm"):
        assert shutil.which(tool), f"{tool} is needed to compile and disassemble the kernels"
    build, source = tmp_path_factory.mktemp("kernels"), Path(__file__).parent.parent / "csrc"
    configure = ["cmake", "-S", source, "-B", build, "-DKTFT_OBJECTS_ONLY=ON", "-DCMAKE_BUILD_TYPE=Release"]
    unwanted = {**os.environ, "CXXFLAGS": "-march=native -ffast-math"}
    subprocess.run(configure, check=True, capture_output=True, timeout=120, env=unwanted)
    subprocess.run(["cmake", "--build", build, "-j2"], check=True, capture_output=True, timeout=300)
    return build


@pytest.fixture(scope="session")
def kernel_objects(objects: Path) -> dict[str, Path]:
    """The object file of each ISA level, twins for tests included."""
    from ktft import ops

    found = {path.name.split(".")[0].replace("_", "-"): path for path in objects.rglob("kernels/*.cpp.o")}
    assert set(found) == {*ops.isa_levels(), *ops.TEST_LEVELS}
    return found


@pytest.fixture(scope="session")
def other_objects(objects: Path) -> dict[str, Path]:
    """The object file of every other source but the bindings'."""
    found = {path.name.split(".")[0]: path for path in objects.rglob("others.dir/*.cpp.o")}
    sources = {path.stem for path in (Path(__file__).parent.parent / "csrc").glob("*.cpp")}
    assert set(found) == sources - {"bindings"}
    return found


# --- benchmarks


@pytest.fixture(scope="session")
def bench_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model of sizes that torch's grouped matmul is capable of, in an adapter's transposes too."""
    from tests.tiny_chat import tiny_chat_model

    return tiny_chat_model(tmp_path_factory.mktemp("base"), hidden_size=64, intermediate_size=32)


@pytest.fixture(scope="session")
def bench_adapter(bench_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 8 for it."""
    from tests.tiny_adapter import random_adapter

    return random_adapter(bench_base, tmp_path_factory.mktemp("adapter"), rank=8)


# --- training and chatting


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model with its tokenizer; not to be changed."""
    from tests.tiny_chat import tiny_chat_model

    return tiny_chat_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of eleven short chats."""
    from tests.tiny_train import tiny_data

    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def upcycle() -> ModuleType:
    """examples/upcycle.py."""
    source = Path(__file__).parents[1] / "examples/upcycle.py"
    spec = importlib.util.spec_from_file_location("upcycle", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- adapter directories


@pytest.fixture(scope="module")
def moe_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE checkpoint; not to be changed."""
    from tests.tiny_models import tiny_checkpoint

    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture
def moe_base(moe_directory: Path) -> PreTrainedModel:
    """It, loaded by ktft in fp32."""
    import torch

    from ktft.model import load_model

    return load_model(moe_directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def good_adapter(moe_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an adapter of it with random A and B; not to be changed."""
    from peft import LoraConfig

    from ktft.adapters import get_peft_model
    from ktft.model import load_model
    from tests.tiny_adapter import FIELDS

    path = tmp_path_factory.mktemp("adapters") / "good"
    model = get_peft_model(load_model(moe_directory), LoraConfig(**FIELDS, init_lora_weights=False))
    model.save_pretrained(path)
    return path


@pytest.fixture
def adapter(good_adapter: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good_adapter, tmp_path / "adapter"))
