"""What ``ktft convert`` makes of each tensor of a checkpoint, decided before anything is written.

- A routed expert's matrix of the chosen layers is encoded. The result has one for each expert and projection, under the
  family's published names: what is fused in the source is taken apart.
- A parameter that is plain is copied byte for byte.
- Anything else that is quantised is decoded to the model's dtype, to the numbers that it has when the source is loaded,
  because one config describes one way of quantising.

Each tensor goes to a file of the same name as it came from, so there are as many files as before, and each can be
written without the others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktft import families, formats
from ktft.checkpoint import CheckpointError
from ktft.convert.source import ExpertMatrix, Source
from ktft.expert_layout import ExpertSource, Tensor
from ktft.weights import PLAIN

Headers = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> safetensors dtype and shape."""


@dataclass(frozen=True)
class Copy:
    """A tensor that stays as it is."""

    tensor: Tensor

    @property
    def reads(self) -> list[Tensor]:
        return [self.tensor]

    @property
    def headers(self) -> Headers:
        return {self.tensor.name: (self.tensor.dtype, self.tensor.shape)}


@dataclass(frozen=True)
class Decode:
    """A coded parameter that becomes a plain one."""

    name: str
    source: ExpertSource
    dtype: torch.dtype

    @property
    def reads(self) -> list[Tensor]:
        return list(self.source.tensors.values())

    @property
    def headers(self) -> Headers:
        return {self.name: (formats.DTYPE_NAMES[self.dtype], self.source.shape)}


@dataclass(frozen=True)
class Encode:
    """A stored matrix and what it holds, one matrix or gate and up: base name -> matrix."""

    source: ExpertSource
    matrices: dict[str, ExpertMatrix]
    encoding: formats.Encoding

    @property
    def reads(self) -> list[Tensor]:
        return list(self.source.tensors.values())

    @property
    def headers(self) -> Headers:
        out: Headers = {}
        for base, matrix in self.matrices.items():
            cols = self.source.shape[0 if matrix.transposed else 1]
            names = self.encoding.names(base)
            headers = formats.encoded_headers(self.encoding, matrix.rows, cols)
            out |= {names[role]: header for role, header in headers.items()}
        return out


Step = Copy | Decode | Encode


@dataclass(frozen=True)
class Shard:
    """One file of the result.

    Attributes:
        name: of the file, the source's too.
        steps: what to do, in the order of the source's bytes.
    """

    name: str
    steps: list[Step]

    @property
    def headers(self) -> Headers:
        """Every tensor."""
        return {name: header for step in self.steps for name, header in step.headers.items()}

    @property
    def read_bytes(self) -> int:
        return sum(tensor.size for step in self.steps for tensor in step.reads)


@dataclass(frozen=True)
class Plan:
    """A conversion.

    Attributes:
        source: what is converted.
        format: the name of what experts become.
        modules: paths of the experts modules that do.
        shards: the files of the result.
        config: contents of its ``config.json``.
        left_out: tensors that it does not have: scales of activations and caches of the source's quantisation.
    """

    source: Source
    format: str
    modules: list[str]
    shards: list[Shard]
    config: dict[str, Any]
    left_out: list[str]

    @property
    def steps(self) -> Iterator[Step]:
        return (step for shard in self.shards for step in shard.steps)


def make_plan(source: Source, format_name: str, layers: Sequence[int] | None) -> Plan:
    """Decide everything.

    Args:
        source: the checkpoint.
        format_name: a key of ``ktft.formats.WRITTEN``.
        layers: numbers of the layers whose experts are encoded; None is all.

    Raises:
        ValueError: an unknown format or layer, or a matrix that the format cannot hold.
        CheckpointError: the experts are stored so already, or two ways of quantising would be needed, or the family's
            readers know no tensors of single experts.
    """
    if format_name not in formats.WRITTEN:
        raise ValueError(f"--format {format_name} is not one that ktft writes; valid: {', '.join(formats.WRITTEN)}")
    encoding = formats.WRITTEN[format_name]
    modules = _modules(source, layers)
    checkpoint = source.checkpoint
    chosen: dict[tuple[Tensor, ...], Encode] = {}
    kept: dict[str, ExpertSource] = {}
    for matrix in source.experts.values():
        stored = matrix.source
        if matrix.module in modules:
            if stored.encoding == encoding:
                raise CheckpointError(
                    f"{source.directory}: the experts of {matrix.module} are stored as {encoding} already; nothing to "
                    "convert"
                )
            step = chosen.setdefault(tuple(stored.tensors.values()), Encode(stored, {}, encoding))
            step.matrices[_base(source, matrix)] = matrix
        else:
            if stored.encoding.format not in PLAIN:
                raise CheckpointError(
                    f"{source.directory}: --layers leaves out {matrix.module}, whose experts are stored as "
                    f"{stored.encoding}; one config cannot say both. Convert all layers, or a checkpoint that is not "
                    "quantised"
                )
            kept.setdefault(stored.tensors["codes"].name, stored)
    _check_sizes(chosen.values(), format_name)
    dtype = _dtype(source)
    steps: list[Step] = [*chosen.values(), *(Copy(checkpoint.tensors[name]) for name in kept)]
    for name in source.others:
        coded = name in checkpoint.coded
        steps.append(Decode(name, checkpoint.source(name), dtype) if coded else Copy(checkpoint.tensors[name]))
    steps.sort(key=lambda step: (step.reads[0].file, step.reads[0].begin))
    shards: dict[str, Shard] = {}
    for ordered in steps:
        name = ordered.reads[0].file.relative_to(source.directory).as_posix()
        shards.setdefault(name, Shard(name, [])).steps.append(ordered)
    config = _config(source, format_name, modules)
    left_out = sorted(checkpoint.detection.ignored)
    plan = Plan(source, format_name, sorted(modules), list(shards.values()), config, left_out)
    _check_readable(plan)
    return plan


def _modules(source: Source, layers: Sequence[int] | None) -> set[str]:
    """Paths of the experts modules of the layers of these numbers."""
    modules = source.outline.modules
    if layers is None:
        return set(modules)
    numbers = {module: int(found.group(1)) for module in modules if (found := re.search(r"\.layers\.(\d+)\.", module))}
    wrong = [number for number in layers if number not in numbers.values()]
    if wrong:
        raise ValueError(
            f"--layers: layer {wrong[0]} has no routed experts; layers that have: "
            f"{', '.join(map(str, sorted({*numbers.values()})))}"
        )
    return {module for module, number in numbers.items() if number in layers}


def _base(source: Source, matrix: ExpertMatrix) -> str:
    """The result's name of a matrix: that of the source's if it is one expert's, else the family's published one."""
    codes = matrix.source.tensors["codes"]
    if codes == source.checkpoint.tensors[codes.name]:
        return matrix.source.base.removesuffix(".weight")
    names = source.outline.modules[matrix.module].names
    own = {"gate": names.gate, "up": names.up, "down": names.down}[matrix.projection]
    return f"{names.disk}.{matrix.expert}.{own}"


def _dtype(source: Source) -> torch.dtype:
    dtype = source.outline.config.dtype or torch.bfloat16
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _check_sizes(steps: Iterable[Encode], format_name: str) -> None:
    for step in steps:
        try:
            _ = step.headers
        except ValueError as error:
            codes = step.source.tensors["codes"]
            raise ValueError(f"{codes.file}: tensor {codes.name!r} cannot become {format_name}: {error}") from None


def _config(source: Source, format_name: str, modules: set[str]) -> dict[str, Any]:
    """The source's, but for what it says of quantisation.

    Modules that stay plain are listed by name, in the model and in the files, whose names differ in some families.
    """
    config = copy.deepcopy(source.outline.config_file)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    stock, checkpoint = source.outline.stock, source.checkpoint
    plain = {name for name, module in stock.named_modules() if isinstance(module, nn.Linear)}
    shapes = {name: checkpoint.source(name).shape for name in source.others if name in checkpoint.coded}
    shapes |= {name: checkpoint.tensors[name].shape for name in source.others if name not in shapes}
    plain |= {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    whole = set()
    for module, experts in source.outline.modules.items():
        if module not in modules:
            whole |= {module, experts.names.disk}
    if formats.WRITTEN[format_name].format != "fp8":
        # compressed-tensors takes a name for that module alone, without what is inside it.
        whole = {f"re:{re.escape(name)}\\..*" for name in whole}
    config["quantization_config"] = formats.written_config(format_name, sorted(plain | whole))
    return config


def _check_readable(plan: Plan) -> None:
    """transformers' own conversion, asked about the result's names, has to find every expert of it."""
    outline = plan.source.outline
    names = [name for step in plan.steps if not isinstance(step, Encode) for name in step.headers]
    names += [f"{base}.weight" for step in plan.steps if isinstance(step, Encode) for base in step.matrices]
    try:
        found = families.expert_tensors(outline.stock, outline.modules, names)
        missing = [module for module in plan.modules if len(found[module]) != 3 * outline.modules[module].num_experts]
    except CheckpointError:
        missing = plan.modules
    if missing:
        raise CheckpointError(
            f"{plan.source.directory}: {outline.config.model_type} has no published names for the tensors of single "
            f"experts ({min(missing)}), which {plan.format} is stored by; transformers would not find them. Only "
            "families whose checkpoints have one tensor for each expert can be converted"
        )


__all__ = ["Copy", "Decode", "Encode", "Headers", "Plan", "Shard", "Step", "make_plan"]
