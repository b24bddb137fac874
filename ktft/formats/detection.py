"""Which encoding each matrix of a checkpoint has: from its config, and from its tensors' names, dtypes and shapes.

All four have to agree. A matrix stored plainly describes itself, so it is accepted where a config does not say
otherwise: a config's words for "every linear layer" do not tell linear layers from embeddings and routers, but it is a
contradiction that a module is plain where the same module of another layer or expert is not, unless the config lists it
among those that are not converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ktft.formats.encoding import Encoding, Header, Matrix, Role, matrix_of
from ktft.formats.floats import PLAIN_DTYPES, plain
from ktft.formats.schemes import Config, Scheme, read_scheme
from ktft.mapping import CheckpointError

_FUSED_CODES = ("_blocks", "")
_CODES = (".weight_packed", ".qweight", ".weight", *_FUSED_CODES)
_SCALES = (
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_scale",
    ".weight_global_scale",
    ".weight_shape",
    ".qzeros",
    "_scale_inv",
)
"""What belongs to codes and to nothing else."""
_AMBIGUOUS = ("_scales", ".scales", ".scale", ".g_idx")
"""What belongs to codes if there are any: models have parameters of these names, too."""
_ACTIVATIONS = (
    ".input_scale",
    ".input_global_scale",
    ".activation_scale",
    "_activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
"""Scales of quantised activations and caches, for which ktft has no use."""
_REFUSED = {
    ".weight_zero_point": "zero points (asymmetric quantisation) are not supported in this layout",
    ".weight_g_idx": "columns quantised in order of activation (act-order) are not supported",
    ".pre_quant_scale": "scaling of a layer's input before its product is not supported",
}
_SUFFIXES = sorted({*_CODES, *_SCALES, *_AMBIGUOUS, *_ACTIVATIONS, *_REFUSED}, key=len, reverse=True)


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix of a checkpoint, or the matrices of E experts in the same tensors (``matrix.experts``).

    Attributes:
        base: the name before every tensor's suffix: a linear layer's module, or a fused parameter.
        encoding: how it is stored.
        matrix: sizes. Plain fused tensors may hold the transpose, which their shapes do not tell.
        names: role -> tensor name, of the tensors that are there.
    """

    base: str
    encoding: Encoding
    matrix: Matrix
    names: dict[Role, str]

    @property
    def parameter(self) -> str:
        """What the weight is called where it is not quantised."""
        return self.base if self.encoding.codes.suffix in _FUSED_CODES else f"{self.base}.weight"


@dataclass(frozen=True)
class Detection:
    """What a checkpoint holds.

    Attributes:
        matrices: base name -> matrix, of every linear weight, embedding, and fused three-dimensional tensor.
        ignored: tensors about quantised activations and caches, which are of no use here.

    Tensors in neither (norms, biases, convolutions) are plain, and nobody's part.
    """

    matrices: dict[str, StoredMatrix]
    ignored: frozenset[str]


def detect(config: Config | None, headers: Mapping[str, Header], hf_quant_config: Config | None = None) -> Detection:
    """How every matrix of a checkpoint is stored.

    Args:
        config: ``quantization_config`` of its ``config.json`` (see :func:`~ktft.formats.quantization_config`), or None.
        headers: tensor name -> dtype and shape, of all files.
        hf_quant_config: the contents of ``hf_quant_config.json``, if there is one.

    Raises:
        CheckpointError: the method or a setting is not supported, or config, names, dtypes and shapes contradict each
            other; names the tensor, and both sides.
    """
    scheme = read_scheme(config, hf_quant_config)
    matrices: dict[str, StoredMatrix] = {}
    ignored: set[str] = set()
    for base, suffixes in _by_base(headers).items():
        found = {suffix: headers[base + suffix] for suffix in suffixes}
        if scheme is not None:
            ignored.update(base + suffix for suffix in suffixes if suffix in _ACTIVATIONS)
        if _is_quantised(found):
            matrices[base] = _quantised(base, found, scheme)
        elif (stored := _plain(base, found)) is not None:
            matrices[base] = stored
    if scheme is not None:
        _check_plain(matrices, scheme)
    return Detection(matrices, frozenset(ignored))


def _by_base(headers: Mapping[str, Header]) -> dict[str, list[str]]:
    """Base name -> suffixes of the tensors that have it."""
    out: dict[str, list[str]] = {}
    for name in headers:
        suffix = next(suffix for suffix in _SUFFIXES if name.endswith(suffix))
        out.setdefault(name.removesuffix(suffix), []).append(suffix)
    return out


def _is_quantised(found: Mapping[str, Header]) -> bool:
    """Whether a name or a dtype is there that plain tensors do not have; bytes may be masks, if they are vectors."""
    if any(suffix in found for suffix in (*_SCALES, *_REFUSED, ".weight_packed", ".qweight")):
        return True
    return any(
        header.dtype.startswith(("F8_", "F6_", "F4")) or (header.dtype in ("U8", "I8") and len(header.shape) > 1)
        for suffix, header in found.items()
        if suffix not in _ACTIVATIONS
    )


def _plain(base: str, found: Mapping[str, Header]) -> StoredMatrix | None:
    for suffix, dimensions in ((".weight", 2), ("", 3)):
        header = found.get(suffix)
        if header is not None and len(header.shape) == dimensions and header.dtype in PLAIN_DTYPES:
            encoding = plain(header.dtype, suffix)
            names = encoding.names(base)
            return StoredMatrix(base, encoding, matrix_of(encoding, {"codes": header}, names), names)
    return None


def _quantised(base: str, found: Mapping[str, Header], scheme: Scheme | None) -> StoredMatrix:
    for suffix, reason in _REFUSED.items():
        if suffix in found:
            raise CheckpointError(f"tensor {base + suffix!r}: {reason}; use a checkpoint quantised without")
    there = ", ".join(f"{base + suffix!r} ({header.dtype} {list(header.shape)})" for suffix, header in found.items())
    if scheme is None:
        raise CheckpointError(
            f"the config has no quantization_config, but these are tensors of a quantised matrix: {there}; "
            "config.json is not this checkpoint's, or incomplete"
        )
    rule = scheme.rule(base)
    if base in scheme.plain or rule is None:
        says = "lists it among the modules that are not converted" if rule else "says nothing of how it is stored"
        raise CheckpointError(f"{scheme.source} {says}: {base!r}; but these are tensors of a quantised matrix: {there}")
    says = f"{scheme.source} says {rule.what}"
    fitting = [
        encoding
        for encoding in rule.encodings
        if (codes := found.get(encoding.codes.suffix)) is not None and codes.dtype in encoding.codes.dtypes
    ]
    if not fitting:
        # Of the layouts that a method may have, those that share a name with what is there.
        near = [e for e in rule.encodings if e.codes.suffix in found] or [
            e for e in rule.encodings if any(tensor.suffix in found for tensor in e.tensors)
        ]
        dtypes: dict[str, list[str]] = {}
        for encoding in near or rule.encodings:
            dtypes.setdefault(base + encoding.codes.suffix, []).extend(encoding.codes.dtypes)
        expected = " or ".join(f"{name!r} of dtype {' or '.join(dict.fromkeys(of))}" for name, of in dtypes.items())
        raise CheckpointError(f"{says}, which has {expected}; found {there}")
    complete = [
        encoding
        for encoding in fitting
        if all(tensor.optional or tensor.suffix in found for tensor in encoding.tensors)
    ]
    error: CheckpointError | None = None
    for encoding in complete or fitting[:1]:
        names = {tensor.role: base + tensor.suffix for tensor in encoding.tensors}
        of_role = {tensor.role: found[tensor.suffix] for tensor in encoding.tensors if tensor.suffix in found}
        try:
            matrix = matrix_of(encoding, of_role, names)
        except CheckpointError as failure:
            error = error or CheckpointError(f"{failure}. {says}")
            continue
        extra = set(found) - {tensor.suffix for tensor in encoding.tensors} - {*_ACTIVATIONS}
        if extra:
            raise CheckpointError(f"tensor {base + min(extra)!r} has no place in {encoding}. {says}; found {there}")
        return StoredMatrix(base, encoding, matrix, {role: names[role] for role in of_role})
    assert error is not None
    raise error


def _check_plain(matrices: Mapping[str, StoredMatrix], scheme: Scheme) -> None:
    """Refuse plain matrices that the config says are not."""
    kinds: dict[str, StoredMatrix] = {}
    for base, stored in matrices.items():
        if stored.encoding.format not in PLAIN_DTYPES.values():
            kinds.setdefault(re.sub(r"\d+", "#", base), stored)
    if not kinds:
        raise CheckpointError(
            f"{scheme.source} says {scheme.rules[0].what}, but no tensor is stored so: the checkpoint was converted, "
            "and its config still says what it was; remove quantization_config"
        )
    for base, stored in matrices.items():
        if stored.encoding.format not in PLAIN_DTYPES.values() or base in scheme.plain:
            continue
        tensor = f"tensor {stored.names['codes']!r} is plain {stored.encoding.format}"
        rule = scheme.rule(base)
        if rule is not None and rule.modules is not None and base in rule.modules.names:
            raise CheckpointError(f"{tensor}, but {scheme.source} says {rule.what} of {base!r}")
        twin = kinds.get(re.sub(r"\d+", "#", base))
        if twin is not None:
            raise CheckpointError(
                f"{tensor}, but {twin.names['codes']!r} is {twin.encoding}, and {scheme.source} does not list "
                f"{base!r} among the modules that are not converted"
            )


__all__ = ["Detection", "StoredMatrix", "detect"]
