"""The PEFT model of ktft: stock PEFT, except that it alone creates, saves and loads adapters on a model with mapped
experts.

    model = ktft.load_model(directory)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "experts"]))
    model.save_pretrained(output)                        # loads with ktft and with stock PEFT onto the stock model
    model = load_adapter(ktft.load_model(directory), output)

Trainer, TRL, ``disable_adapter``, ``set_adapter``, ``add_adapter``, ``delete_adapter`` and ``adapter_names`` go
through PEFT's own code. What a model with mapped experts cannot do (merge them, save fully trained modules) is
refused by name.
"""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from peft import LoraConfig, PeftConfig, PeftModel, PeftModelForCausalLM
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from transformers import PreTrainedModel

from ktft.adapters.base import (
    base_name,
    base_revision,
    mark_merged,
    published_vocabulary,
    refuse_merged,
    refuse_resized,
    refuse_trained_base,
)
from ktft.adapters.config import (
    COMPILED,
    AdapterError,
    adapter_layers,
    check_config,
    module_name,
    resolve_targets,
    stock_config,
    training_fields,
)
from ktft.adapters.disk import AdapterTensors, read_adapter, refuse_model_directory, write_adapter
from ktft.adapters.layout import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    StoredAdapter,
    fused,
    peft_converts_experts,
    per_expert,
)
from ktft.experts import CpuExperts, check_sources
from ktft.lora import MERGE_REFUSED, ExpertLora
from ktft.mapping import CheckpointError
from ktft.weights import LORA_NAMES

NO_META = "low_cpu_mem_usage=True is not supported: adapters are created with values, and filled in place"
_REWRITTEN = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
"""Fields that PEFT rewrites for stock fused experts."""


class KtftLoraModel(LoraModel):
    """PEFT's LoRA tuner, taught what ``experts`` means. Created by :class:`KtftPeftModel`."""

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, low_cpu_mem_usage: bool = False, **kwargs: Any
    ) -> None:
        if low_cpu_mem_usage:
            raise AdapterError(NO_META)
        config = self.peft_config[adapter_name]
        check_config(config)
        if any(COMPILED in name.split(".") for name, _ in model.named_modules()):
            raise AdapterError(
                "modules of this model are compiled already; add adapters first, then call torch.compile"
            )
        assert isinstance(model, PreTrainedModel)
        resolve_targets(config, model)
        config._register_custom_module({CpuExperts: ExpertLora})
        # PEFT first rewrites target names for stock fused experts (gate_proj -> the parameter gate_up_proj), which
        # are not here and would take shared experts and dense layers with them. It is shown no target, and gets them
        # in _prepare_adapter_config.
        self._requested = {name: getattr(config, name) for name in _REWRITTEN}
        config.target_modules = set()
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        finally:
            for name, value in self._requested.items():
                setattr(config, name, value)

    def _prepare_adapter_config(self, peft_config: LoraConfig, model_config: dict[str, Any]) -> LoraConfig:
        for name, value in self._requested.items():
            setattr(peft_config, name, value)
        return peft_config

    def _check_merge_allowed(self) -> None:
        if any(isinstance(module, ExpertLora) for module in self.model.modules()):
            raise NotImplementedError(MERGE_REFUSED)
        super()._check_merge_allowed()

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        changed = merge or any(isinstance(m, BaseTunerLayer) and m.merged for m in self.model.modules())
        unloaded = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        if changed:
            mark_merged(self.model)
        return unloaded

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "add_weighted_adapter does not know expert LoRA; activate several adapters, which add up"
        )


class KtftPeftModel(PeftModelForCausalLM):
    """A causal language model with mapped experts and LoRA adapters.

    Args:
        model: from ``ktft.load_model``.
        peft_config: a LoraConfig in the training form; kept, and changed as PEFT does.
        adapter_name: name of the first adapter.
        autocast_adapter_dtype: as in PEFT, for the adapters outside the experts; those inside are always fp32.

    Raises:
        AdapterError: the config cannot be served, see :func:`ktft.adapters.config.check_config` and
            ``resolve_targets``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        peft_config: PeftConfig,
        adapter_name: str = "default",
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
    ) -> None:
        if low_cpu_mem_usage:
            raise AdapterError(NO_META)
        if not any(isinstance(module, CpuExperts) for module in model.modules()):
            raise AdapterError(
                f"this {type(model).__name__} has no mapped experts; load it with ktft.load_model, or use stock PEFT"
            )
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise AdapterError(
                "the model carries adapters already: use add_adapter on its PeftModel, or unload() them first"
            )
        check_config(peft_config)
        # Asked now: at the end of a training the directory may have moved.
        vocabulary = published_vocabulary(model)
        refuse_resized(model, vocabulary)
        # PeftModel builds a stock tuner. It is given a config that adapts nothing, and replaced by the tuner that
        # knows experts.
        super().__init__(model, LoraConfig(target_modules=DUMMY_TARGET_MODULES, task_type="CAUSAL_LM"), adapter_name)
        del model.peft_config
        self.vocabulary = vocabulary
        try:
            self.base_model = KtftLoraModel(model, {adapter_name: peft_config}, adapter_name)
        except Exception:
            _strip(model)
            raise
        self.base_model._cast_adapter_dtype(adapter_name=adapter_name, autocast_adapter_dtype=autocast_adapter_dtype)

    # --- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        path_initial_model_for_weight_conversion: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``; an adapter not named "default" goes into a
        folder of its name.

        The arguments are PEFT's, so that trainers can call it. Tensors are written in fp32 (adapters outside the
        experts in their own dtype). A process killed meanwhile leaves the previous files.

        Args:
            state_dict: values to write in place of the model's, under the names of ``state_dict()``; trainers that
                gather shards use it.

        Raises:
            AdapterError: a value is not finite, the directory holds the base model, the base is not what it was (its
                vocabulary was resized, an adapter merged, parameters outside the adapters are trained), or an argument
                asks for what cannot be written.
        """
        state_dict = kwargs.pop("state_dict", None)
        kwargs.pop("max_shard_size", None)  # an adapter is one file
        if not safe_serialization:
            raise AdapterError("safe_serialization=False would pickle the adapter; ktft writes safetensors only")
        if save_embedding_layers not in ("auto", False):
            raise AdapterError("save_embedding_layers=True is not supported: the file holds LoRA tensors only")
        if path_initial_model_for_weight_conversion is not None or kwargs:
            unknown = sorted(kwargs) or ["path_initial_model_for_weight_conversion"]
            raise AdapterError(f"save_pretrained does not support {unknown}")
        names = list(self.peft_config) if selected_adapters is None else selected_adapters
        unknown = [name for name in names if name not in self.peft_config]
        if unknown:
            raise AdapterError(f"no adapter named {unknown}; the model has {list(self.peft_config)}")
        if not is_main_process:
            return
        model = self.get_base_model()
        refuse_resized(model, self.vocabulary)
        refuse_merged(model)
        refuse_trained_base(model)
        try:
            check_sources(model)
        except CheckpointError as error:  # not a refusal: what was trained would be lost over a mere touch of a file
            warnings.warn(f"saving the adapter all the same: {error}", stacklevel=2)
        for name in names:
            config = self.peft_config[name]
            directory = Path(save_directory) if name == "default" else Path(save_directory) / name
            if directory.is_file():
                raise AdapterError(f"{directory} is a file; give a directory")
            refuse_model_directory(directory, base_name(model))
            _name_base(config, model)
            tensors = _adapter_tensors(model, name, state_dict)
            stock = stock_config(config, model, name)
            write_adapter(directory, tensors, stock, training_fields(config), model.config.model_type)

    def load_adapter(  # type: ignore[override]
        self,
        model_id: str | os.PathLike[str],
        adapter_name: str,
        is_trainable: bool = False,
        torch_device: str | None = None,
        autocast_adapter_dtype: bool = True,
        ephemeral_gpu_offload: bool = False,
        low_cpu_mem_usage: bool = False,
        key_mapping: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> _IncompatibleKeys:
        """Load an adapter: a new one under this name, or new values for the one that has it.

        Values are copied into the existing parameters, so an optimizer's references stay valid. Every tensor in the
        file is accounted for, and every adapted module of the model, before anything changes.

        Args:
            model_id: a directory, or the id of an adapter on the hub (``subfolder``, ``revision``, ``cache_dir``,
                ``token`` as in PEFT).
            adapter_name: new or existing. A new one is not activated.
            is_trainable: whether the adapter gets gradients (an existing one keeps its own if False); False also puts
                the model in eval mode, as PEFT does.

        Returns:
            PEFT's result type; both lists are empty.

        Raises:
            AdapterError: names the file and the tensor or key that does not fit.
        """
        if low_cpu_mem_usage or key_mapping or ephemeral_gpu_offload or kwargs.pop("ignore_mismatched_sizes", False):
            raise AdapterError(
                "load_adapter does not support low_cpu_mem_usage, key_mapping, ephemeral_gpu_offload or "
                "ignore_mismatched_sizes: an adapter fits as it is, or is refused"
            )
        stored = read_adapter(_adapter_directory(model_id, **kwargs), self.get_base_model())
        with AdapterTensors(stored) as tensors:
            new = adapter_name not in self.peft_config
            if new:
                config = _training_config(stored, self.get_base_model(), is_trainable)
                self.add_adapter(adapter_name, config, autocast_adapter_dtype=autocast_adapter_dtype)
            try:
                self._fill(stored, tensors, adapter_name)
            except Exception:
                if new:
                    self.delete_adapter(adapter_name)
                raise
        if is_trainable:
            self.peft_config[adapter_name].inference_mode = False
            self.set_requires_grad(adapter_name)
        if not is_trainable:
            self.eval()
        return _IncompatibleKeys([], [])

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        model: PreTrainedModel,
        model_id: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = False,
        config: PeftConfig | None = None,
        autocast_adapter_dtype: bool = True,
        ephemeral_gpu_offload: bool = False,
        low_cpu_mem_usage: bool = False,
        key_mapping: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> KtftPeftModel:
        """A model from ``ktft.load_model`` with one adapter from a directory or the hub.

        Arguments and errors as in :meth:`load_adapter`.
        """
        if config is not None or low_cpu_mem_usage or key_mapping or ephemeral_gpu_offload:
            raise AdapterError(
                "from_pretrained does not support config, low_cpu_mem_usage, key_mapping or ephemeral_gpu_offload"
            )
        kwargs.pop("torch_device", None)
        stored = read_adapter(_adapter_directory(model_id, **kwargs), model)
        with AdapterTensors(stored) as tensors:
            trained = _training_config(stored, model, is_trainable)
            peft_model = cls(model, trained, adapter_name, autocast_adapter_dtype=autocast_adapter_dtype)
            try:
                peft_model._fill(stored, tensors, adapter_name)
            except Exception:
                peft_model.unload()
                raise
        if not is_trainable:
            peft_model.eval()
        return peft_model

    def _fill(self, stored: StoredAdapter, tensors: AdapterTensors, adapter_name: str) -> None:
        layers = adapter_layers(self.get_base_model(), adapter_name)
        _check_fit(stored, layers, adapter_name)
        for path, experts in stored.experts.items():
            layer = layers[path]
            assert isinstance(layer, ExpertLora)
            tensors.copy_experts(experts, dict(zip(LORA_NAMES, layer.factors(adapter_name), strict=True)))
        for path, linear in stored.linears.items():
            layer = layers[path]
            tensors.copy_linear(linear, layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight)

    # --- the rest of PEFT ---------------------------------------------------------------------------------------------

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trainable, all) parameters; mapped experts count in the second."""
        trainable, everything = super().get_nb_trainable_parameters()
        experts = [module for module in self.modules() if isinstance(module, CpuExperts)]
        return trainable, everything + sum(module.parameter_count for module in experts)


def get_peft_model(model: PreTrainedModel, peft_config: LoraConfig, adapter_name: str = "default") -> KtftPeftModel:
    """Add a new LoRA adapter to a model from ``ktft.load_model``; the model is changed in place, as in PEFT.

    Args:
        model: from ``ktft.load_model``.
        peft_config: ``target_modules`` names Linear modules, and ``experts`` for every routed expert; "all-linear"
            includes the routed experts. ``rank_pattern`` and ``alpha_pattern`` may give ``experts`` its own rank and
            alpha. It is copied.
        adapter_name: name of the adapter.

    Raises:
        AdapterError: a field that is not supported, a target that matches nothing, a model with adapters, with merged
            ones, or without mapped experts.
    """
    if isinstance(model, PeftModel):
        raise AdapterError("the model is a PeftModel already: use its add_adapter")
    refuse_merged(model)
    config = copy.deepcopy(peft_config)
    config.base_model_name_or_path = None
    _name_base(config, model)
    return KtftPeftModel(model, config, adapter_name)


def load_adapter(
    model: PreTrainedModel | KtftPeftModel,
    directory: str | os.PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
) -> KtftPeftModel:
    """Put an adapter from a directory (or the hub) on a model from ``ktft.load_model``; on a KtftPeftModel it becomes
    a further one.

    Reads what ktft saves, per-expert PEFT adapters, and the fused ``target_parameters`` adapters of stock PEFT 0.19.1
    and later.

    Raises:
        AdapterError: names the file and the tensor or key that does not fit.
    """
    if isinstance(model, KtftPeftModel):
        model.load_adapter(directory, adapter_name, is_trainable=is_trainable)
        return model
    return KtftPeftModel.from_pretrained(model, directory, adapter_name, is_trainable=is_trainable)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _adapter_tensors(
    model: PreTrainedModel, adapter_name: str, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Tensor name on disk -> value; per expert, views of the trained stacks."""
    given = {f"{PREFIX}{name}": value for name, value in model.named_parameters()} if state_dict is None else state_dict
    parameters = {module_name(name): value for name, value in given.items()}

    def value(name: str) -> torch.Tensor:
        if f"{PREFIX}{name}" not in parameters:
            raise AdapterError(f"the state_dict given to save_pretrained lacks {PREFIX}{name}")
        return parameters[f"{PREFIX}{name}"].detach()

    arrange = per_expert if peft_converts_experts(model) else fused
    out: dict[str, torch.Tensor] = {}
    for path, layer in adapter_layers(model, adapter_name).items():
        if isinstance(layer, ExpertLora):
            stacks = {
                slot: value(f"{path}.lora_{slot[-1].upper()}.{adapter_name}.{slot[:-2]}").contiguous()
                for slot in LORA_NAMES
            }
            out |= arrange(layer.base_layer, stacks)
            continue
        for side in "AB":
            out[f"{PREFIX}{path}.lora_{side}.weight"] = value(f"{path}.lora_{side}.{adapter_name}.weight").contiguous()
    return out


def _name_base(config: LoraConfig, model: PreTrainedModel) -> None:
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base_name(model)
    if config.revision is None:
        config.revision = base_revision(model)


def _training_config(stored: StoredAdapter, model: PreTrainedModel, is_trainable: bool) -> LoraConfig:
    """A config in the training form under which the model gets exactly the layers the file holds."""
    file = stored.config
    if stored.training is not None:
        fields = dict(stored.training)
    else:
        layers = stored.layers()
        alphas = {path: scaling * (math.sqrt(r) if file.use_rslora else r) for path, (r, scaling) in layers.items()}
        (rank, _), alpha = next(iter(layers.values())), next(iter(alphas.values()))
        fields = {
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": sorted(layers),
            "rank_pattern": {re.escape(path): r for path, (r, _) in layers.items() if r != rank},
            "alpha_pattern": {re.escape(path): value for path, value in alphas.items() if value != alpha},
            "use_rslora": file.use_rslora,
            "lora_dropout": file.lora_dropout,
        }
    return LoraConfig(
        **fields,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(model) or file.base_model_name_or_path,
        revision=file.revision,
        inference_mode=not is_trainable,
    )


def _check_fit(stored: StoredAdapter, layers: dict[str, LoraLayer], adapter_name: str) -> None:
    """The model's layers and the file's must be the same, with the same rank and scaling."""
    held = stored.layers()
    for path in sorted(set(held) ^ set(layers)):
        where = "the file, but not the model's adapter" if path in held else "the model's adapter, but not the file"
        raise AdapterError(f"{stored.directory}: adapter {adapter_name!r}: {where}, adapts {path!r}")
    for path, (rank, scaling) in held.items():
        layer = layers[path]
        if layer.r[adapter_name] != rank or not math.isclose(layer.scaling[adapter_name], scaling, rel_tol=1e-6):
            raise AdapterError(
                f"{stored.directory}: {path!r} has rank {rank} and scaling {scaling:.9g} by {CONFIG_FILE} and "
                f"{WEIGHTS_FILE}, but adapter {adapter_name!r} has rank {layer.r[adapter_name]} and scaling "
                f"{layer.scaling[adapter_name]:.9g}"
            )


def _adapter_directory(model_id: str | os.PathLike[str], **hub: Any) -> Path:
    subfolder = hub.pop("subfolder", None)
    unknown = sorted(set(hub) - {"revision", "cache_dir", "token", "local_files_only"})
    if unknown:
        raise AdapterError(f"loading an adapter does not support {unknown}")
    name, path = os.fspath(model_id), Path(model_id)
    if path.is_dir():
        return path / subfolder if subfolder else path
    if path.exists() or path.is_absolute() or len(path.parts) != 2:
        raise AdapterError(f"{name!r} is neither an adapter directory nor an id on the hub")
    if path.parent.is_dir():  # an id on the hub looks the same, but this is a path with a slip in it
        raise AdapterError(
            f"there is no adapter directory {name!r}; {path.parent} is a directory, so the hub is not asked for one"
        )
    try:
        files = [hf_hub_download(name, file, subfolder=subfolder, **hub) for file in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, HFValidationError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AdapterError(f"{name!r} is no directory here, and cannot be had from the hub: {first}") from None
    return Path(files[0]).parent


def _strip(model: nn.Module) -> None:
    """Undo an injection that failed half-way: put the wrapped modules back."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent) if parent else model, child, module.get_base_layer())


__all__ = ["KtftLoraModel", "KtftPeftModel", "get_peft_model", "load_adapter"]
