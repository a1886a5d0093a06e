"""`rotate`: the one function that a user of Rotated Tensor Parallelism calls."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.home import Home, home_of, settle
from gyre_trainer.layers.attention import Attention, AttentionRule
from gyre_trainer.layers.embedding import EmbeddingRule
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLP, GatedMLP, MLPRule
from gyre_trainer.layers.replicated import Replicas, ReplicatedModule, replicated
from gyre_trainer.layout import Layout
from gyre_trainer.mesh import require_ring
from gyre_trainer.ring import ring_of
from gyre_trainer.rotated import RotatedModule
from gyre_trainer.rotation import Rotation, RotationPolicy
from gyre_trainer.rule import Rule
from gyre_trainer.turn import prove

__all__ = ["RotationPolicy", "rotate"]

_DEFAULT_POLICY = RotationPolicy()


def rotate(
    module: nn.Module, *, mesh: DeviceMesh, policy: RotationPolicy = _DEFAULT_POLICY, rule: Rule | None = None
) -> nn.Module:
    """Spread a module's parameters over the ranks of ``mesh``: each keeps a slice and sees the others pass.

    Apply it bottom-up: to each MLP, attention, embedding and large linear layer, which then rotate, and at last to the model,
    whose remaining parameters (norms, small biases) are kept whole on every rank. It changes the module in place and returns
    it. Its parameters are DTensors from then on: give them to the optimizer afterwards.

    Each rank calls the module with its own part of the batch, and `loss.backward()` leaves gradients that are averaged over
    the ranks, as data parallelism does: where every rank's loss is the mean over its part and all parts are equally large,
    these are the gradients of the mean over the whole batch. All ranks must make the same calls in the same order.

    Args:
        module: on `meta` (then `gyre_trainer.flyweight.materialize` follows), or with the same values on every rank.
        mesh: of one axis, as `gyre_trainer.mesh.make_mesh` gives it.
        policy: dtypes of what travels.
        rule: how the module is cut; None for the rule of its class, if it has one. It is put to the proof at the first call.

    Raises:
        MeshError: the mesh is not a ring with this rank on it.
        RotationError: the module was rotated before, or cannot be cut like this; names module and parameter.
    """
    require_ring(mesh)
    if isinstance(module, RotatedModule):
        raise RotationError(f"{type(module).__name__} is rotated already")
    own_rule = rule or _rule_of(module)
    if own_rule is None:
        _replicate(module, mesh)
    else:
        _turn_over(module, mesh, policy, own_rule)
    if rule is not None and rule.linear_in:
        _prove_at_first_call(module)
    return module


def _prove_at_first_call(module: nn.Module) -> None:
    """Where the user says how a module is cut, its first call shows whether that is true, before anything is trained."""

    def first_call(rotated: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook.remove()
        assert isinstance(rotated, RotatedModule)
        prove(rotated.rotation, args, kwargs)

    hook = module.register_forward_pre_hook(first_call, with_kwargs=True)


def _rule_of(module: nn.Module) -> Rule | None:
    match module:
        case nn.Linear():
            return LinearRule()
        case nn.Embedding():
            return EmbeddingRule(module.num_embeddings)
        case GatedMLP():
            return MLPRule(ups=("gate", "up"))
        case MLP():
            return MLPRule()
        case Attention():
            return AttentionRule(module.heads.num_kv_heads)
        case _:
            return None


def _turn_over(module: nn.Module, mesh: DeviceMesh, policy: RotationPolicy, rule: Rule) -> None:
    """Move the module's parameters home and put the rotation in the place of its forward."""
    for name, child in module.named_modules():
        if isinstance(child, RotatedModule):
            raise RotationError(
                f"{type(module).__name__}.{name} is rotated already; rotate either it or {type(module).__name__}"
            )
    layout = Layout(tuple(rule.cuts(module, ring_of(mesh).size)), ring_of(mesh).size)
    home = _home(module, layout, mesh)
    for cut, parameter in zip(layout.cuts, home.parameters, strict=True):
        path, _, name = cut.name.rpartition(".")
        setattr(module.get_submodule(path), name, parameter)
    cut_names = {cut.name for cut in layout.cuts}
    passengers = tuple(name for name, _ in module.named_parameters() if name not in cut_names)
    rotation = Rotation(module, module.forward, rule, layout, home, policy, passengers)
    _mix_in(module, RotatedModule, "Rotated")
    module.rotation = rotation  # type: ignore[assignment]
    module._by_rule = {}  # type: ignore[assignment]


def _home(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> Home:
    """Where the parameters live: a new home, or the one of the module that they are tied with."""
    sources = [module.get_parameter(cut.name) for cut in layout.cuts]
    tied = [home_of(source) for source in sources]
    if all(home is None for home in tied):
        _require_uniform(module, layout, sources, mesh)
        return settle(sources, layout, mesh)
    home = tied[0]
    if home is None or any(other is not home for other in tied) or home.layout.shapes != layout.shapes:
        names = ", ".join(cut.name for cut, other in zip(layout.cuts, tied, strict=True) if other is not None)
        raise RotationError(
            f"{type(module).__name__} shares {names} with a module that is rotated already and cut in another way; "
            "tied modules must have the same parameters, all cut alike"
        )
    return home


def _require_uniform(module: nn.Module, layout: Layout, sources: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Refuse parameters that cannot lie in one buffer on the mesh's device."""
    for cut, source in zip(layout.cuts, sources, strict=True):
        where = f"{type(module).__name__}.{cut.name}"
        if source.dtype != sources[0].dtype:
            raise RotationError(f"{where} is {source.dtype}, but {layout.cuts[0].name} beside it is {sources[0].dtype}")
        if source.device.type not in ("meta", mesh.device_type):
            raise RotationError(f"{where} is on {source.device}, but the mesh is of {mesh.device_type}")


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep all parameters of the module that do not rotate whole on every rank."""
    if hasattr(module, "replicas"):
        raise RotationError(f"{type(module).__name__} is rotated already")
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for path, child in list(module.named_modules()):
        loose = {name: p for name, p in child._parameters.items() if p is not None and not isinstance(p, DTensor)}
        for name, parameter in loose.items():
            if home_of(parameter) is not None:
                raise RotationError(
                    f"{type(module).__name__}.{path}.{name} is tied to a parameter that rotates; rotate {path} too, before this"
                )
            if parameter not in copies:
                copies[parameter] = replicated(parameter, mesh)
            setattr(child, name, copies[parameter])
        if loose and not isinstance(child, RotatedModule):
            _mix_in(child, ReplicatedModule, "Replicated")
    module.replicas = Replicas(list(copies.values()), mesh)  # type: ignore[assignment]  # kept alive, and a mark


def _mix_in(module: nn.Module, behaviour: type, prefix: str) -> None:
    """The module's class becomes a subclass of itself with another forward; what it is an instance of stays true."""
    cls = type(module)
    module.__class__ = type(f"{prefix}{cls.__name__}", (behaviour, cls), {})
