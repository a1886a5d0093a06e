"""Weights in the layout of `transformers`: safetensors files, an index, and `config.json`.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    rotate_all(model, mesh=mesh)
    pretrained.load(model, path)
    ...
    pretrained.save_pretrained(model, "result")  # AutoModelForCausalLM.from_pretrained("result")

A rank reads and writes the bytes of its own shards alone, so none ever holds the model. All ranks
must see the same folder.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gyre_trainer.adapter_files import has_adapters, is_adapted, load_adapters, save_adapters
from gyre_trainer.errors import CheckpointRejected, RotationError
from gyre_trainer.layers.quantized_linear import is_quantized
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.shards.initial.sharded_init import allocate
from gyre_trainer.shards.sharded_parameters import note_rewritten
from gyre_trainer.shards.stored_weights import (
    Files,
    Target,
    agreed,
    read_targets,
    stored_dtype,
    targets_of,
    write_targets,
)
from gyre_trainer.shards.tensor_files import StoredTensor, layout_of, read_header

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# As transformers has it. Smaller files load in parallel from object storage; each is one more open.
_MAX_FILE_BYTES = 5_000_000_000


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_mapping: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Copy the weights of a folder, or of one safetensors file, into a model, rotated or not.

    Afterwards every parameter and persistent buffer has the values of the files, cast to its dtype.
    On `meta`, it is given memory first, and other buffers are computed by their constructors.
    From a folder with adapters of peft, a `PeftModel` takes these alone.

    Args:
        model: rotated or not.
        path: a folder with `model.safetensors`, or with its index and several files; or a file.
        key_mapping: regular expressions of names in the files, and what replaces them; of those
            that fit a name, the first one does. None for the model's
            `_checkpoint_conversion_mapping`, if it has one.
        device: where parameters on `meta` that are not rotated go.

    Raises:
        CheckpointRejected: on every rank: a file is damaged, a parameter is missing or of another
            shape, or a file has tensors that the model has not; the message names them.
    """
    if is_adapted(model) and has_adapters(Path(path)):
        load_adapters(model, Path(path))
        return
    allocate(model, torch.device(device))
    with agreed("loading weights"):
        stored = _renamed(model, _stored_tensors(Path(path)), key_mapping)
        targets = _targets(model)
        _require_all_used(model, targets, stored, path)
        read_targets(targets, stored, path)
        note_rewritten(model.parameters())


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a model as `transformers` does; collective. The folder may exist.

    Of a `PeftModel` its adapters alone are written, as peft does, each in one file.

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
    """
    folder = Path(path)
    if is_adapted(model):
        save_adapters(model, folder, dtype=dtype)
        return
    targets = _targets(model)
    files = _files(folder, targets, dtype, max_file_bytes)
    write_targets(folder, targets, files, lambda: _finish(model, folder, files, dtype))


def _targets(model: nn.Module) -> list[Target]:
    """Parameters and persistent buffers, each once."""
    for path, module in model.named_modules():
        if is_quantized(module):
            raise RotationError(
                f"{path} has quantized weights, which no file of the library's layout holds; load "
                "before quantize_frozen, and save adapters by peft's save_pretrained"
            )
    return targets_of(model.state_dict(keep_vars=True))


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder or file."""
    if path.is_file():
        return read_header(path)
    index = path / _INDEX
    if not index.exists():
        return read_header(path / _ONE_FILE)
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointRejected(f"{index} names files outside of its folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRejected(f"{index} is no index of safetensors files") from error
    files = {name: read_header(path / name) for name in names}
    for key, name in weight_map.items():
        if key not in files[name]:
            raise CheckpointRejected(f"{index} says that {key} is in {name}, but it is not")
    return {key: files[name][key] for key, name in weight_map.items()}


def _renamed(
    model: nn.Module, stored: dict[str, StoredTensor], key_mapping: Mapping[str, str] | None
) -> dict[str, StoredTensor]:
    """The tensors by the names that the model has for them."""
    mapping = key_mapping
    if mapping is None:
        mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    # of the oldest files, such as those of the first BERT: gamma and beta of norms
    older: Any = getattr(model, "_fix_state_dict_key_on_load", lambda key: (key, False))
    stored = {_mapped(older(key)[0], mapping): each for key, each in stored.items()}
    known = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "") or ""
    return {_with_prefix(key, prefix, known): each for key, each in stored.items()}


def _mapped(key: str, mapping: Mapping[str, str]) -> str:
    """The name after the first of the replacements that fits, as transformers has it."""
    for pattern, replacement in mapping.items():
        name, num_replaced = re.subn(pattern, replacement, key)
        if num_replaced:
            return name
    return key


def _with_prefix(key: str, prefix: str, known: Mapping[str, object]) -> str:
    """A file may be of the base model alone, or of a model around it."""
    if key in known or not prefix:
        return key
    other = f"{prefix}.{key}" if not key.startswith(f"{prefix}.") else key[len(prefix) + 1 :]
    return other if other in known else key


def _require_all_used(
    model: nn.Module, targets: list[Target], stored: Mapping[str, object], path: object
) -> None:
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    known = {name for target in targets for name in target.names}
    known |= {name for name, _ in model.named_buffers()}  # computed ones, of older versions
    unknown = sorted(
        key for key in stored if key not in known and not any(re.search(p, key) for p in ignored)
    )
    if unknown:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointRejected(
            f"{path} has {unknown[0]}{more}, which {own_class(model).__name__} does not have; "
            "use the model that it was saved from, or key_mapping for other names"
        )


def _files(
    folder: Path, targets: list[Target], dtype: torch.dtype | None, max_file_bytes: int
) -> Files:
    """Header and places of each file, by its name."""
    groups: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    size = 0
    for target in targets:
        stored = stored_dtype(target.whole, dtype)
        num_bytes = target.whole.numel() * stored.itemsize
        if groups[-1] and size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append((target.names[0], tuple(target.whole.shape), stored))
        size += num_bytes
    names = [_ONE_FILE]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    return {
        name: layout_of(folder / name, group) for name, group in zip(names, groups, strict=True)
    }


def _finish(
    model: nn.Module,
    folder: Path,
    files: Files,
    dtype: torch.dtype | None,
) -> None:
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
    config = getattr(model, "config", None)
    save_config: Callable[[Path], Any] | None = getattr(config, "save_pretrained", None)
    if save_config is not None:
        described: Any = deepcopy(config)
        described.architectures = [own_class(model).__name__]
        described.dtype = str(stored_dtype(next(model.parameters()), dtype)).removeprefix("torch.")
        described.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        with suppress(ValueError):  # a combination that generation itself refuses later
            generation.save_pretrained(folder)
