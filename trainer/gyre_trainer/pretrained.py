"""Weights in the layout of `transformers`: safetensors files, an index, and `config.json`.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    rotate_all(model, mesh=mesh)
    pretrained.load(model, path)
    ...
    pretrained.save_pretrained(model, "result")  # AutoModelForCausalLM.from_pretrained("result")

A rank reads and writes the bytes of its own shards alone, so none ever holds the model. All ranks
must see the same folder.

Adapters of peft are in its own layout, `adapter_model.safetensors` and `adapter_config.json`. Each
has a folder: "default" the given one, others one below it with their name. Their parameters are
whole on every rank, or sharded as others are, such as those of `modules_to_save`.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from gyre_trainer.errors import CheckpointRejected, RotationError
from gyre_trainer.layers.quantized import is_quantized
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.shards.initialisation import adapters_of, allocate, begin_adapters
from gyre_trainer.shards.layout import local_of
from gyre_trainer.shards.stored_weights import (
    Files,
    Joined,
    Target,
    agreed,
    is_first_rank,
    joined,
    read_targets,
    stored_dtype,
    targets_of,
    tensors_in,
    write_targets,
)
from gyre_trainer.shards.tensor_files import layout_of, read_regular
from gyre_trainer.whole.adapters import reads_weights

_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of names in the file: a `PeftModel` has the model there


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a `PeftModel`, or a model into which peft has put adapters."""
    return bool(getattr(model, "peft_config", None))


def _is_peft_model(model: nn.Module) -> bool:
    return hasattr(model, "get_base_model")


def has_adapters(folder: Path) -> bool:
    """Whether a folder has the weights of adapters, in itself or one level below."""
    return (folder / _WEIGHTS).exists() or any(folder.glob(f"*/{_WEIGHTS}"))


def load_adapters(model: Any, folder: Path) -> None:
    """Copy the weights of all adapters of a model into it; collective.

    Raises:
        CheckpointRejected: on every rank: a file is missing, damaged, or of other adapters.
    """
    with agreed("loading adapters"):
        for name in model.peft_config:
            path = _folder(folder, name) / _WEIGHTS
            _require_same_settings(model, name, path.parent)
            stored, targets = tensors_in(path), _adapter_targets(model, name)
            unknown = sorted(stored.keys() - {each.names[0] for each in targets})
            if unknown:
                raise CheckpointRejected(
                    f"{path} has {unknown[0]}, which the adapter {name!r} does not have. Load it "
                    "into a model with the adapters that it was saved from."
                )
            read_targets(targets, stored, path)


# Settings of LoRA that change the results of its weights, but neither their names nor their shapes.
_COMPUTED_BY = ("lora_alpha", "use_rslora", "alpha_pattern", "init_lora_weights")


def _require_same_settings(model: Any, name: str, folder: Path) -> None:
    """Refuse weights that would compute something else in the model."""
    path = folder / _SETTINGS
    try:
        there = dict(json.loads(read_regular(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointRejected(f"{path} cannot be read: {error}") from error
    for key in _COMPUTED_BY:
        of_file, own = (
            # how weights began only matters where the weights below were changed for it
            None if key == "init_lora_weights" and not reads_weights(value) else value or None
            for value in (there.get(key), getattr(model.peft_config[name], key, None))
        )
        if of_file != own:
            raise CheckpointRejected(
                f"the adapter in {folder} has {key} {of_file}, but that of the model {own}. Make "
                "the model's adapters with the settings that those were trained with."
            )


def save_adapters(model: Any, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write all adapters of a model, so that `PeftModel.from_pretrained` loads them.

    Collective. The weights below the adapters are not written, as in peft.

    Raises:
        CheckpointFailed: on every rank: a file could not be written.
        RotationError: an adapter makes its weights when it is saved, as prompts do.
    """
    for name in model.peft_config:
        here, targets = _folder(folder, name), _adapter_targets(model, name)
        tensors = [
            (each.names[0], tuple(each.whole.shape), stored_dtype(each.whole, dtype))
            for each in targets
        ]
        files = {_WEIGHTS: layout_of(here / _WEIGHTS, tensors)}
        write_targets(here, joined(targets), files, partial(_describe, model, name, here))


def _folder(folder: Path, name: str) -> Path:
    return folder if name == "default" else folder / name


def _adapter_targets(model: nn.Module, name: str) -> list[Target]:
    """The tensors of an adapter under the names that they have in its file, one for each name."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415  # seconds, for these models alone

    state = model.state_dict(keep_vars=True)
    own = {id(each) for each in state.values()}
    chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
    for key, tensor in chosen.items():
        if id(tensor) not in own:
            raise RotationError(
                f"{key} of the adapter {name!r} is no parameter of the model, so it cannot be "
                "saved by shards. Save it by peft's save_pretrained."
            )
    prefix = "" if _is_peft_model(model) else _PREFIX
    return [target for key in chosen for target in targets_of({prefix + key: chosen[key]})]


def _describe(model: Any, name: str, folder: Path) -> None:
    """Write the settings of an adapter and the model's card, as peft does."""
    settings: Any = deepcopy(model.peft_config[name])
    base = model.get_base_model() if _is_peft_model(model) else model
    settings.inference_mode = True
    settings.base_model_name_or_path = (
        settings.base_model_name_or_path or vars(base).get("name_or_path") or None
    )
    mapping = None
    if settings.task_type is None:
        kind = own_class(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    settings.save_pretrained(str(folder), auto_mapping_dict=mapping)
    if _is_peft_model(model):
        model.create_or_update_model_card(str(folder))


_log = logging.getLogger(__name__)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# As transformers has it. Smaller files load in parallel from object storage; each is one more open.
_MAX_FILE_BYTES = 5_000_000_000


class _Index(msgspec.Struct):
    """Which file has each tensor."""

    weight_map: dict[str, str]


_INDEX_DECODER = msgspec.json.Decoder(_Index)


class IncompatibleKeys(NamedTuple):
    """The differences between model and files, as `torch.nn.Module.load_state_dict` returns it.

    Attributes:
        missing_keys: parameters and buffers of the model that the files lack.
        unexpected_keys: tensors of the files, as the model would name them, that it lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    key_mapping: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
) -> IncompatibleKeys:
    """Copy the weights of a folder, or of one safetensors file, into a model, rotated or not.

    Afterwards every parameter and persistent buffer has the values of the files, cast to its dtype.
    On `meta`, it is given memory first, and other buffers are computed by their constructors.
    From a folder with adapters of peft, a model with adapters takes these alone. From another one
    it takes the weights below them, and adapters without a value, which were on `meta`, begin as
    peft begins them; torch's generator draws their values, so seed it alike on all ranks.

    Args:
        model: rotated or not.
        path: a folder with `model.safetensors`, or with its index and several files; or a file.
        strict: whether model and files must have the same tensors. If not, a warning names what
            differs: the model keeps its values of what the files lack, such as a new head's, and
            tensors that it lacks are left out.
        key_mapping: regular expressions of names in the files, and what replaces them; of those
            that fit a name, the first one does. None for none but those that transformers knows.
        device: for parameters on `meta` that do not rotate.

    Returns:
        The differences, if not ``strict``; empty lists otherwise.

    Raises:
        CheckpointRejected: on every rank: a file is damaged, a tensor has another shape, or, if
            ``strict``, is missing or unexpected; the message names it. If not, a missing one has no
            value yet, because it is on `meta` (call `materialize` before), or nothing is shared.
    """
    if is_adapted(model) and has_adapters(Path(path)):
        load_adapters(model, Path(path))
        return IncompatibleKeys([], [])
    base: nn.Module = model.get_base_model() if _is_peft_model(model) else model  # type: ignore[operator]
    has_no_value = {name for name, each in _state(base).items() if _has_no_value(each)}
    begins = any(map(_has_no_value, _adapters(base)))
    allocate(model, torch.device(device))
    if begins:
        begin_adapters(base)
    model = base
    with agreed("loading weights"):
        stored = _of_model(model, _stored_tensors(Path(path)), key_mapping, path)
        targets, missing = _targets(model), list[str]()
        unexpected, kind = _unexpected(model, targets, stored), own_class(model).__name__
        if strict and unexpected:
            raise CheckpointRejected(
                f"{path} has {_first_of(unexpected)}, which {kind} does not have. Use the model "
                "that it was saved from, key_mapping for other names, or strict=False to leave "
                "them out."
            )
        if not strict:
            missing = [each.names[0] for each in targets if stored.keys().isdisjoint(each.names)]
            _require_values(missing, has_no_value, path)
            targets = [each for each in targets if each.names[0] not in missing]
            if not targets:
                raise CheckpointRejected(f"{path} has no tensor of {kind}")
            _require_no_codes(targets, stored, unexpected, path)
        read_targets(targets, stored, path)
    if missing and is_first_rank():
        _log.warning("%s has no %s: values are kept", path, _first_of(missing))
    if unexpected and is_first_rank():
        others = _first_of(unexpected)
        _log.warning("%s has %s, which %s does not have: left out", path, others, kind)
    return IncompatibleKeys(missing, unexpected)


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a model as `transformers` does; collective. The folder may exist.

    Of a model with adapters these alone are written, as peft does, each in one file.

    Args:
        model: rotated or not. Where it has a `config` and a `generation_config` of transformers,
            these are written too.
        path: the folder, the same for all ranks.
        dtype: of the floating-point tensors in the files; None for that of each parameter.
        max_file_bytes: a file is closed before it would become larger; a larger tensor has a file
            of its own.

    Raises:
        CheckpointFailed: on every rank: a file could not be written; files of the same names that
            were there before are as they were.
        RotationError: transformers computes the files' tensors of values that no rank has whole.
    """
    folder = Path(path)
    if is_adapted(model):
        save_adapters(model, folder, dtype=dtype)
        return
    tensors = _of_files(model, joined(_targets(model)))
    files = _files(folder, tensors, dtype, max_file_bytes)
    write_targets(folder, tensors, files, lambda: _finish(model, folder, files, dtype))


def _targets(model: nn.Module) -> list[Target]:
    """Parameters and persistent buffers, each once."""
    for path, module in model.named_modules():
        if is_quantized(module):
            raise RotationError(
                f"{path} has quantized weights, which no file of the library's layout holds. Load "
                "before quantize_frozen, and save adapters by peft's save_pretrained."
            )
    return targets_of(_state(model))


def _adapters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of adapters of layers."""
    modules = [adapter for module in model.modules() for adapter in adapters_of(module)]
    return [parameter for module in modules for parameter in module.parameters()]


def _state(model: nn.Module) -> dict[str, Any]:
    """What the files of a model have, by its names there: peft puts layers into others."""
    adapters = {id(each) for each in _adapters(model)}
    state = model.state_dict(keep_vars=True)
    own = {name: each for name, each in state.items() if id(each) not in adapters}
    return {name.replace(".base_layer.", "."): each for name, each in own.items()}


def _stored_tensors(path: Path) -> dict[str, Joined]:
    """All tensors of a folder or file."""
    if path.is_file():
        return tensors_in(path)
    index = path / _INDEX
    if not index.exists():
        if not (path / _ONE_FILE).exists():
            raise CheckpointRejected(
                f"{path} has neither {_ONE_FILE} nor {_INDEX}; weights in other files, such as "
                "pytorch_model.bin, must be saved again by save_pretrained of transformers"
            )
        return tensors_in(path / _ONE_FILE)
    try:
        weight_map = _INDEX_DECODER.decode(read_regular(index)).weight_map
    except OSError as error:
        raise CheckpointRejected(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointRejected(f"{index} is no index of safetensors files: {error}") from error
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointRejected(f"{index} names files outside of its folder")
    files = {name: tensors_in(path / name) for name in names}
    for key, name in weight_map.items():
        if key not in files[name]:
            raise CheckpointRejected(f"{index} says that {key} is in {name}, but it is not")
    return {key: files[name][key] for key, name in weight_map.items()}


def _of_model(
    model: nn.Module,
    stored: dict[str, Joined],
    key_mapping: Mapping[str, str] | None,
    path: object,
) -> dict[str, Joined]:
    """The tensors of the files as the model has them, by the names that it has for them."""
    if key_mapping is not None:
        stored = {_mapped(key, key_mapping): each for key, each in stored.items()}
    if (library := _library_of(model)) is not None:
        return _converted(model, library, stored, path)
    if key_mapping is None:
        mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
        stored = {_mapped(key, mapping): each for key, each in stored.items()}
    # of the oldest files, such as those of the first BERT: gamma and beta of norms
    older: Any = getattr(model, "_fix_state_dict_key_on_load", lambda key: (key, False))
    known = _state(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def name_of(key: str) -> str:
        """The model's name: a file may be of the base model alone, or of a model around it."""
        key = older(key)[0]
        other = key.removeprefix(prefix) if key.startswith(prefix) else prefix + key
        return other if key not in known and other in known else key

    return {name_of(key): each for key, each in stored.items()}


def _library_of(model: nn.Module) -> Any:
    """What transformers knows of files since version 5; None for older ones and other models.

    No public function tells it: `from_pretrained` loads whole models. Peft uses the same module.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    with suppress(ImportError):
        return import_module("transformers.core_model_loading")
    return None


def _converted(
    model: Any, loading: Any, stored: Mapping[str, Joined], path: object
) -> dict[str, Joined]:
    """The tensors as transformers makes them of those of the files.

    Raises:
        CheckpointRejected: it makes some of values that are not read, or files lack some.
    """
    known = _state(model)
    mapping: Any = import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, Joined] = {}
    groups: dict[str, Any] = {}
    for key in sorted(stored, key=loading.dot_natural_key):  # experts by their numbers
        prefix = model.base_model_prefix
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if pattern is None or name not in known:
            found[name] = stored[key]
            continue
        group = groups.setdefault(name, deepcopy(by_pattern[pattern]))
        group.add_tensor(name, key, pattern, stored[key])
    for name, group in groups.items():
        try:
            found |= _values(group.convert(name, model=model, config=model.config))
        except Exception as error:  # of the library's operations
            raise CheckpointRejected(
                f"{path} has tensors from which {name} cannot be made by parts: {error}. Make the "
                "model by from_pretrained of transformers, and rotate it then."
            ) from error
    return found


def _values(converted: Any) -> dict[str, Joined]:
    """The tensors that a conversion has made; before 5.2 there is something else next to them."""
    made: Mapping[str, Any] = converted[0] if isinstance(converted, tuple) else converted
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _of_files(model: nn.Module, tensors: dict[str, Joined]) -> dict[str, Joined]:
    """The model's tensors as its files have them, by the names that these have.

    Raises:
        RotationError: transformers makes some of them of values.
    """
    library = _library_of(model)
    if library is None:
        return tensors
    try:
        return dict(library.revert_weight_conversion(model, tensors))
    except Exception as error:  # of the library's operations
        raise RotationError(
            f"{own_class(model).__name__} cannot be saved by parts: transformers needs whole "
            f"tensors to write its weights ({error}). Gather them by "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), load "
            "them into a model before it is rotated, and call its save_pretrained."
        ) from error


def _mapped(key: str, mapping: Mapping[str, str]) -> str:
    """The name after the first of the replacements that fits, as transformers has it."""
    for pattern, replacement in mapping.items():
        name, num_replaced = re.subn(pattern, replacement, key)
        if num_replaced:
            return name
    return key


def _unexpected(model: nn.Module, targets: list[Target], stored: Mapping[str, object]) -> list[str]:
    """Names of stored tensors that the model lacks, but for those that it lets be ignored."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    known = {name for target in targets for name in target.names}
    known |= {name for name, _ in model.named_buffers()}  # computed ones, of older versions
    return sorted(
        key for key in stored if key not in known and not any(re.search(p, key) for p in ignored)
    )


def _has_no_value(tensor: object) -> bool:
    """Whether it is on `meta`, or was when it was rotated: then its shard is all NaN."""
    if not isinstance(tensor, Tensor):
        return False
    local = local_of(tensor).detach()
    is_number = local.is_floating_point() and local.numel()
    return local.is_meta or bool(is_number and local.isnan().all())


def _require_values(missing: Sequence[str], has_no_value: set[str], path: object) -> None:
    without = [name for name in missing if name in has_no_value]
    if without:
        raise CheckpointRejected(
            f"{path} has no {_first_of(without)}, and the model has no value of it yet; to begin "
            "with new values there, call materialize(model, seed=...) before"
        )


def _require_no_codes(
    targets: Sequence[Target],
    stored: Mapping[str, Joined],
    unexpected: Sequence[str],
    path: object,
) -> None:
    """Refuse weights whose scales the model would leave out."""
    names = (name for target in targets for name in target.names if name in stored)
    codes = [name for name in names if stored[name].dtype in _FLOAT8]
    if codes and unexpected:
        raise CheckpointRejected(
            f"{path} has {codes[0]} in float8 and {_first_of(unexpected)}, which the model would "
            "leave out though they may be scales; write the weights in another dtype first"
        )


def _first_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]}, and {len(names) - 1} more" if len(names) > 1 else names[0]


def _files(
    folder: Path, tensors: Mapping[str, Joined], dtype: torch.dtype | None, max_file_bytes: int
) -> Files:
    """Header and places of each file, by its name."""
    groups: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        stored = stored_dtype(tensor, dtype)
        num_bytes = tensor.numel() * stored.itemsize
        if groups[-1] and size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append((name, tuple(tensor.shape), stored))
        size += num_bytes
    names = [_ONE_FILE]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    return {
        name: layout_of(folder / name, group) for name, group in zip(names, groups, strict=True)
    }


def _finish(model: nn.Module, folder: Path, files: Files, dtype: torch.dtype | None) -> None:
    """Remove the files of an earlier save, and write the others."""
    if len(files) > 1:
        total = sum(each.num_bytes for _, places in files.values() for each in places.values())
        weight_map = {key: name for name, (_, places) in files.items() for key in places}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        (folder / _INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        is_ours = re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name)
        if is_ours and old.name not in files:
            old.unlink()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        described = deepcopy(config)
        described.architectures = [own_class(model).__name__]
        described.dtype = str(stored_dtype(next(model.parameters()), dtype)).removeprefix("torch.")
        described.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        with suppress(ValueError):  # a combination that generation itself refuses later
            generation.save_pretrained(folder)
