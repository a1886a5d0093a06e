"""Rotated Tensor Parallelism for your own training script: import the public names from here.

`rotate_all` rotates a whole model, `rotate` one module. The rules for known kinds of modules are in
the modules of `gyre_trainer.layers`; a rule for a new kind derives from
`gyre_trainer.rotation.rule.Rule`. `ReadRule` is for a module that reads parameters of its own.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from gyre_protos.text import counted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from gyre_trainer.comm.identity import name_modules
from gyre_trainer.comm.mesh import make_mesh, replica_group, require_ring
from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import RotationError
from gyre_trainer.inspection.agreement import count_alike, require_all_ranks, require_equal_models
from gyre_trainer.inspection.rotation_plan import (
    RotationPlan,
    note_layer_by_layer,
    plan_of,
    warn_of_whole_parameters,
)
from gyre_trainer.inspection.verification import check_at_first_calls
from gyre_trainer.layers.causal_loss import causal_loss
from gyre_trainer.layers.experts import call_every_expert
from gyre_trainer.layers.head import TokenLogProbs, linear_cross_entropy, token_log_probs
from gyre_trainer.layers.known_blocks import (
    KnownBlocks,
    has_code_of,
    is_of_known_class,
    leave_fused_inference,
    rotate_known,
    suggested_rule,
)
from gyre_trainer.layers.quantized import Format, encode_layers
from gyre_trainer.layers.recomputed_layers import recompute_layers, recompute_norms
from gyre_trainer.optimizers.adafactor import Adafactor
from gyre_trainer.optimizers.adamw_8bit import AdamW8bit
from gyre_trainer.optimizers.muon import Muon
from gyre_trainer.optimizers.stochastic import stochastically_rounded
from gyre_trainer.rotation.rotated_module import (
    RotatedModule,
    RotationTarget,
    adapt_library_models,
    num_hooks_inside,
    wrap,
)
from gyre_trainer.rotation.rule import RotationPolicy, Rule
from gyre_trainer.shards.initialisation import adapters_of, materialize
from gyre_trainer.shards.sharded_parameters import support_dtensors
from gyre_trainer.torch_internals import gradient_hooks_of
from gyre_trainer.whole.adapters import refuse_later_adapters
from gyre_trainer.whole.replicated import (
    MIN_READ_NUMEL,
    ReadRule,
    is_read_elsewhere,
    no_sync,
    read_layers_of,
    reads_much,
    register_forward_method,
    replicate,
    shard_own,
    share_cut,
)


def quantize_frozen(
    model: nn.Module, to: Format, *, mesh: DeviceMesh, keep: Collection[str] = ("lm_head",)
) -> list[str]:
    """Keep and send the frozen linear layers of a rotated model in few bits; collective.

    Each layer that rotates by itself is encoded: a rank's own rows at home, and on their way. A
    slice is decoded on arrival, so results are those of a model with the decoded weights. All other
    weights stay as they are: embeddings, blocks that rotate as a whole, and what is tied. So rotate
    the model with ``find_blocks=False``; a warning names blocks that were left out.

    Args:
        model: rotated, with values, and with frozen weights; its adapters are left as they are.
        to: "int8", a byte for each weight and 4 for each row, off by at most 1/254 of the largest
            weight of the row; or "nf4", half a byte and 1/16 of a byte, off by at most 0.152 of the
            largest of 64.
        mesh: the mesh of the model.
        keep: the last parts of the paths of layers that stay as they are, such as "lm_head", whose
            loss is taken by slices of the vocabulary.

    Returns:
        The paths of the layers that were encoded.

    Raises:
        RotationError: a layer that is not kept trains or has no finite values yet, or none is
            left, or the ranks differ.

    Example:
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        rotate_all(model, mesh=mesh, find_blocks=False)
        pretrained.load(model, path)
        quantize_frozen(model, "nf4", mesh=mesh)
    """
    paths = encode_layers(model, to, keep)
    require_equal_models(model, mesh)
    return paths


__all__ = [
    "Adafactor",
    "AdamW8bit",
    "Muon",
    "ReadRule",
    "RotationPlan",
    "RotationPolicy",
    "TokenLogProbs",
    "causal_loss",
    "linear_cross_entropy",
    "make_mesh",
    "materialize",
    "name_modules",
    "no_sync",
    "plan_of",
    "quantize_frozen",
    "register_forward_method",
    "rotate",
    "rotate_all",
    "stochastically_rounded",
    "token_log_probs",
]

_DEFAULT_POLICY = RotationPolicy()
_QUANTIZERS = ("torchao", "bitsandbytes")
SMALL_NUMEL = 2**18  # below, a module is replicated by default

Rules = Mapping[type[nn.Module] | str, Rule | None]
"""Rules by the class or the path of the modules that they apply to; None keeps a module whole."""


def rotate(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    policy: RotationPolicy = _DEFAULT_POLICY,
    rule: Rule | None = None,
    sync_from: int | None = None,
    verify: bool | None = None,
    independent: bool = False,
) -> nn.Module:
    """Shard a module's parameters over the ring of ``mesh``: each of its N ranks keeps 1/N of them.

    The module is changed in place and returned. From then on:

    * Its parameters are DTensors on ``mesh``, so create the optimizer after this call.
    * A call takes this rank's part of the batch and returns the output for that part, with the
      shapes and dtypes that the module has without rotation.
    * `loss.backward()` leaves gradients averaged over the ranks, as data parallelism does.
      If every rank's loss is the mean over its part and all parts are equally large, these are the
      gradients of the mean over the whole batch.
    * All ranks must call the same modules in the same order.

    Apply it bottom-up: to each MLP, attention, embedding and large linear layer, and at last to the
    model. That last call keeps the remaining parameters (norms, small biases) whole on every rank.
    `rotate_all` does all of this.

    Args:
        module: on `meta` (then call `materialize` afterwards), or with the same values on every
            rank.
        mesh: as `make_mesh` gives it: one axis, the ring; or two, replicas and the ring.
        policy: the dtypes of travelling slices, and recomputation.
        rule: how the module is cut; None for the way of its class, if it has one. A rule is checked
            at the first call in training and in evaluation.
        sync_from: the rank of the mesh whose values all ranks take; None where all have the same,
            which is checked.
        verify: as `rotate_all` has it.
        independent: as `rotate_all` has it.

    Raises:
        MeshError: the mesh is no ring, or replicas of rings, with this rank on it.
        RotationError: the module was rotated before, or cannot be cut like this, or differs among
            ranks; the message names module and parameter.

    Example:
        mesh = make_mesh("cpu")  # after torch.distributed.init_process_group
        for block in model.blocks:
            rotate(block.attention, mesh=mesh, rule=AttentionRule(num_kv_heads=8))
            rotate(block.mlp, mesh=mesh, rule=MLPRule(ups=("gate", "up")))
        rotate(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    _prepare(module, mesh, sync_from, independent=independent)
    target = RotationTarget(mesh, policy)
    if isinstance(rule, ReadRule):
        shard_own(module, rule, target)
    elif rule is not None:
        _require_no_hooks(module)
        wrap(module, rule, target)
    elif not rotate_known(module, target):
        _keep_whole(module, target)
    check_at_first_calls(module, rule, verify)
    return module


def rotate_all(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    policy: RotationPolicy = _DEFAULT_POLICY,
    rules: Rules | None = None,
    sync_from: int | None = None,
    verify: bool | None = None,
    find_blocks: bool = True,
    min_numel: int | None = None,
    independent: bool = False,
) -> RotationPlan:
    """Rotate every large module in ``model`` whose kind is known, and each with a rule.

    All others are replicated: whole on every rank.

    Afterwards all that `rotate` promises is true of the whole model. Modules that were rotated
    before are left as they are. Parameters of 2^18 elements or more that other modules have
    themselves are sharded, too, and gathered while their forward runs (`ReadRule`).

    Args:
        model: on `meta` (then call `materialize` afterwards), or with the same values on every
            rank.
        mesh: as `make_mesh` gives it: one axis, the ring; or two, replicas and the ring.
        policy: the dtypes of travelling slices, and recomputation. A library's
            `gradient_checkpointing_enable()` before this call implies `recompute="layer"`.
        rules: rules for modules of a class, or of a path such as "blocks.0.mlp" or "blocks.*.mlp",
            in which * stands for any text, dots included. A path is preferred to a class, and an
            earlier key to a later one. None instead of a rule keeps a module whole.
        sync_from: the rank of the mesh whose parameters and buffers all ranks take, such as the one
            that loaded them; None where all have the same, which is checked.
        verify: whether a layer that rotates by itself is compared with the whole one at its first
            calls, in training and in evaluation, as blocks always are: outputs, and so gradients.
            Each rank gathers one layer at a time for that. None verifies layers with a rule that
            have up to 4 million parameters, and the plan names larger ones; True every layer.
        find_blocks: whether attention and MLPs whose code is in the table of known blocks rotate as
            one (`gyre_trainer.layers.known_blocks`). All others, such as attention whose key/value
            heads the ranks cannot share evenly, rotate layer by layer, and the returned plan says
            why. False lets all layers rotate one by one, which `quantize_frozen` needs.
        min_numel: a module whose largest parameter has fewer elements is replicated, unless it has
            a rule, and so are smaller parameters that a module reads: their hops would take longer
            than their memory is worth. None for 2^18, 1 MiB in float32; 0 rotates all.
        independent: whether a mesh of a part of the ranks trains apart from the others; without
            it, such a mesh is refused.

    Returns:
        How every parameter was treated, as a table when it is printed. `plan_of(model)` returns the
        same again.

    Raises:
        MeshError: the mesh is no ring, or replicas of rings, with this rank on it.
        RotationError: a module cannot be cut like this, or the model differs among ranks, or a rule
            applies to no module; the message names module and parameter.

    Example:
        mesh = make_mesh("cuda")  # after torch.distributed.init_process_group
        with torch.device("meta"):
            model = MyModel()
        print(rotate_all(model, mesh=mesh, rules={MyMLP: MLPRule(ups=("w1", "w3"), down="w2")}))
        materialize(model, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    _prepare(model, mesh, sync_from, independent=independent)
    if _checkpoints_layers(model):
        policy = replace(policy, recompute="layer")
    target = RotationTarget(mesh, policy)
    blocks = KnownBlocks(model, target.num_slices, experts_alone=not find_blocks)
    walk = _Walk(
        rules or {}, target, verify, blocks, SMALL_NUMEL if min_numel is None else min_numel
    )
    walk.visit("", model)
    walk.require_all_used()
    share_cut(model, target)
    has_no_others = all(isinstance(p, DTensor) for p in model.parameters())
    if isinstance(model, RotatedModule) and has_no_others and replica_group(mesh) is None:
        name_modules(model)
        require_equal_models(model, mesh)
    else:
        _keep_whole(model, target)
    adapt_library_models(model)
    for module, reason in blocks.reasons.items():
        note_layer_by_layer(module, reason, suggested_rule(module))
    plan = plan_of(model)
    warn_of_whole_parameters(model, plan, walk.kept, is_of_known_class)
    return plan


@dataclass
class _Walk:
    """A walk down a model to the topmost modules that rotate.

    Attributes:
        kept: by paths of modules that stay whole on purpose, why they do.
        used: keys of the rules that have applied.
    """

    rules: Rules
    target: RotationTarget
    verify: bool | None
    blocks: KnownBlocks
    min_numel: int
    kept: dict[str, str] = field(default_factory=dict)
    used: set[type[nn.Module] | str] = field(default_factory=set)

    def visit(self, path: str, module: nn.Module, *, keeps_whole: bool = False) -> None:
        """Rotate the module, or the modules inside it; with ``keeps_whole`` only by rules."""
        key = self._key(path, module)
        if isinstance(module, RotatedModule) or is_read_elsewhere(module):
            pass
        elif key is not None:
            self.used.add(key)
            rule = self.rules[key]
            if rule is None:
                self.kept[path] = "a rule of None keeps them whole"
            elif isinstance(rule, ReadRule):
                shard_own(module, rule, self.target)
                self._visit_inside(path, module, keeps_whole=keeps_whole)
            else:
                self._rotate(module, rule)
        elif all(parameter.numel() < self.min_numel for parameter in module.parameters()):
            self.kept[path] = f"they have less than {self.min_numel:,} elements (min_numel)"
        elif keeps_whole:
            self._visit_inside(path, module, keeps_whole=True)
        elif not self._rotate_by_kind(module):
            min_numel = max(self.min_numel, MIN_READ_NUMEL)
            if reads_much(module, min_numel):
                shard_own(module, ReadRule(min_numel), self.target)
            self._visit_inside(path, module, keeps_whole=False)

    def _visit_inside(self, path: str, module: nn.Module, *, keeps_whole: bool) -> None:
        adapters, read = adapters_of(module), read_layers_of(module)
        for name, child in module.named_children():
            inner = f"{path}.{name}".removeprefix(".")
            if child in read:
                self.kept[inner] = f"{type(module).__name__} reads them when it generates"
            whole = keeps_whole or child in adapters or child in read
            self.visit(inner, child, keeps_whole=whole)

    def _rotate_by_kind(self, module: nn.Module) -> bool:
        """Rotate a module whose kind or whose code is known, and return whether it is."""
        if rotate_known(module, self.target):
            check_at_first_calls(module, None, self.verify)
            return True
        rule = self.blocks.rule_of(module)
        if rule is not None:
            self._rotate(module, rule)
        return rule is not None

    def _rotate(self, module: nn.Module, rule: Rule) -> None:
        _require_no_hooks(module)
        wrap(module, rule, self.target)
        check_at_first_calls(module, rule, self.verify)

    def require_all_used(self) -> None:
        for key in self.rules:
            if key not in self.used:
                name = repr(key) if isinstance(key, str) else key.__name__
                reasons = [
                    f"; {type(module).__name__}: {reason}"
                    for module, reason in self.blocks.reasons.items()
                    if isinstance(key, type) and isinstance(module, key)
                ]
                raise RotationError(
                    f"the rule for {name} fits no module, or only modules inside one that rotates"
                    + "".join(reasons[:1])
                )

    def _key(self, path: str, module: nn.Module) -> type[nn.Module] | str | None:
        paths = [key for key in self.rules if isinstance(key, str) and fnmatchcase(path, key)]
        classes = [
            key
            for key in self.rules
            if isinstance(key, type) and isinstance(module, key) and self._applies(key, module)
        ]
        return (*paths, *classes, None)[0]

    def _applies(self, key: type[nn.Module], module: nn.Module) -> bool:
        """Whether the rule of a class is for this module's code, not for that of its subclass."""
        rule = self.rules[key]
        if rule is None or isinstance(rule, ReadRule):
            return True
        reason = ""
        if not has_code_of(module, key):
            reason = f"it overrides code of {key.__name__}, which the rule is for"
        elif num_hooks_inside(module):
            reason = "a hook is registered on a layer inside"
        if reason:
            self.blocks.reasons[module] = reason
        return not reason


def _checkpoints_layers(model: nn.Module) -> bool:
    """Turn a library's own checkpoints of layers off, and return whether there were any."""
    found: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in found:
        module.gradient_checkpointing = False
    return bool(found)


def _require_no_hooks(module: nn.Module) -> None:
    if num_hooks_inside(module):
        raise RotationError(
            f"{type(module).__name__}: a hook is registered on a layer inside, and would be "
            "called for each slice, with a part of the layer's output. Remove it, register it "
            "on the module itself, or give no rule for the module"
        )


def _prepare(
    module: nn.Module, mesh: DeviceMesh, sync_from: int | None, *, independent: bool
) -> None:
    """Check mesh and module, and prepare torch for shards."""
    require_ring(mesh)
    require_all_ranks(mesh, independent=independent)
    _require_new(module)
    count_alike(mesh)
    _sync(module, mesh, sync_from)
    support_dtensors()
    refuse_later_adapters()


def _require_new(module: nn.Module) -> None:
    """Refuse a module rotated already, and parameters that cannot be sharded.

    Those are complex ones, quantized ones, those without a shape, and those with hooks.
    """
    if isinstance(module, RotatedModule) or hasattr(module, "grad_averaging"):
        raise RotationError(f"{type(module).__name__} is rotated already")
    inside = (each for each in module.modules() if hasattr(each, "grad_averaging"))
    averaging: list[Any] = [each.grad_averaging for each in inside]
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            continue
        if parameter.is_complex():
            raise RotationError(
                f"{type(module).__name__}.{name} is {parameter.dtype}, but complex parameters "
                "cannot be trained on a ring. Keep it as a real parameter with a last dim of 2 "
                "(torch.view_as_real), and read it by torch.view_as_complex in the forward"
            )
        library = type(parameter).__module__.partition(".")[0]
        if library in _QUANTIZERS:
            raise RotationError(
                f"{type(module).__name__}.{name} is quantized by {library} (got a "
                f"{type(parameter).__name__}). Load the model without quantization, rotate it, "
                "and call quantize_frozen"
            )
        if is_lazy(parameter):
            raise RotationError(
                f"{type(module).__name__}.{name} has no shape yet; "
                "call the model once before it is rotated"
            )
        hooks = [
            h for each in (True, False) for h in gradient_hooks_of(parameter, accumulated=each)
        ]
        if hooks and not any(parameter in each for each in averaging):
            raise RotationError(
                f"{type(module).__name__}.{name} has a hook on its gradient, which the sharded "
                "parameter in its place would not call. Register hooks after rotating, for "
                "gradients that are DTensors."
            )


def _sync(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Take the values of rank ``source`` of the mesh; None leaves each rank its own."""
    if source is None:
        return
    if not 0 <= source < mesh.size():
        ranks = counted(mesh.size(), "rank")
        raise RotationError(f"sync_from is {source}, but the mesh has {ranks}")
    place = (mesh.mesh.flatten() == mesh.mesh.flatten()[source]).view(mesh.shape).nonzero()[0]
    with collective("taking the values of one rank"):
        for _, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_meta and not isinstance(tensor, DTensor):
                whole = tensor.detach().contiguous()
                for axis, group_rank in enumerate(place):
                    dist.broadcast(whole, group=mesh.get_group(axis), group_src=group_rank)
                if not whole.is_set_to(tensor):
                    tensor.detach().copy_(whole)


def _keep_whole(module: nn.Module, target: RotationTarget) -> None:
    """Keep every parameter in the module that does not rotate whole on every rank."""
    name_modules(module)
    require_equal_models(module, target.mesh)
    call_every_expert(module)
    leave_fused_inference(module)
    replicate(module, target.mesh, target.policy.outer_dtype)
    if target.policy.recomputes:
        recompute_norms(module)
    if target.policy.recompute == "layer":
        recompute_layers(module)
