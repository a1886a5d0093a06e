"""The configured model, rotated before it exists."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer import pretrained
from gyre_trainer.errors import ConfigError, RotationError
from gyre_trainer.rotate import RotationPolicy, materialize, quantize_frozen, rotate_all
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.shards.layout import local_of
from gyre_trainer.torch_internals import parameters_of
from gyre_trainer.training import run_checkpoints
from gyre_trainer.training.config import ModelConfig, TrainConfig
from gyre_trainer.training.gpt import GPT, GPTConfig
from gyre_trainer.training.library import LibraryConfig, layers_of, library_model
from gyre_trainer.training.lora import adapt
from gyre_trainer.training.losses import LibraryLoss, Loss
from gyre_trainer.training.rank_context import RankContext


def plain(model: ModelConfig) -> nn.Module:
    """The model on torch's current default device, not distributed yet and without adapters.

    Raises:
        ConfigError: there is no such model of transformers.
    """
    return GPT(model) if isinstance(model, GPTConfig) else library_model(model)


def loss_of(model: nn.Module) -> Loss:
    """The loss of a GPT, or of a language model of `transformers`."""
    return model.loss if isinstance(model, GPT) else LibraryLoss(model)


def set_resting_dtype(model: nn.Module, config: TrainConfig) -> None:
    """Convert a plain model without adapters to the dtype that its parameters rest in.

    Buffers stay as they are. Where only adapters train, so does all but the layers with matrices,
    whose biases have the dtype of their weights, and stacked experts.
    """
    rounds = config.optimizer.stochastic_rounding
    lora = config.model.lora
    if not (rounds or (lora.rank and lora.frozen == "bfloat16")):
        return
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        own = {name: each for name, each in parameters_of(module).items() if each is not None}
        is_layer = own.keys() <= {"weight", "bias"} and any(p.ndim > 1 for p in own.values())
        if not (rounds or is_layer or any(p.ndim > 2 for p in own.values())):
            continue
        for name, each in own.items():
            if each.is_floating_point():
                if each not in converted:  # tied ones stay tied
                    converted[each] = nn.Parameter(each.detach().bfloat16(), each.requires_grad)
                parameters_of(module)[name] = converted[each]


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The model's blocks, or layers."""
    return list(model.blocks if isinstance(model, GPT) else layers_of(model))


def rotated(config: TrainConfig, mesh: DeviceMesh) -> nn.Module:
    """The model, rotated before it exists, so that no rank ever holds more than its own shards.

    Its parameters, and those of its adapters, have no values until `materialize`.
    """
    with torch.device("meta"):
        model = plain(config.model)
        set_resting_dtype(model, config)
        add_adapters(model, config)
    dtypes = config.precision
    policy = RotationPolicy(
        compute_dtype=getattr(torch, dtypes.compute_dtype),
        grad_dtype=getattr(torch, dtypes.grad_dtype),
        recompute=config.memory.recompute,
    )
    rotate_all(
        model,
        mesh=mesh,
        policy=policy,
        find_blocks=not config.model.lora.rank,
        # Encoded layers rotate. A checkpoint must not depend on which of them are small.
        min_numel=0 if config.model.lora.encodes else config.memory.min_numel,
    )
    return model


def build_model(
    config: TrainConfig, context: RankContext, weights: Path | None = None
) -> nn.Module:
    """The rotated model with its first weights: given ones, pretrained ones, or initial ones.

    Args:
        config: of the run.
        context: the rank.
        weights: a folder that `gyre-train export` or `transformers` wrote, of the model or of its
            adapters; None for the weights that the configuration says.

    Raises:
        ConfigError: there is no such model of transformers, or no weights can be given to it, or
            its frozen weights cannot be encoded.
        CheckpointRejected: its folder has no weights of it, or damaged ones.
    """
    of_model, of_adapters = _sources(config.model, weights)
    model = rotated(config, context.mesh)
    if of_model:
        # A folder may have more than the model, such as the second head of BERT's pretraining. What
        # it lacks has no value yet, so it is refused.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            pretrained.load(model, of_model, strict=False, device=context.device)
    else:
        materialize(model, seed=config.run.seed, device=context.device)
    encode_frozen(model, config, context.mesh)
    if of_adapters:
        pretrained.load_adapters(model, of_adapters)
    return model


def restored(config: TrainConfig, context: RankContext, path: Path) -> tuple[nn.Module, int]:
    """The rotated model with the values of a checkpoint, and its step; collective.

    Raises:
        CheckpointRejected: the checkpoint is of another model, or damaged.
    """
    model = rotated(config, context.mesh)
    allocate(model, context.device)
    for parameter in model.parameters():
        local_of(parameter).detach().zero_()  # its old bytes may be no number to encode
    encode_frozen(model, config, context.mesh)
    return model, run_checkpoints.load_model(model, path, config.model)


def _sources(model: ModelConfig, given: Path | None) -> tuple[Path | None, Path | None]:
    """The folders of the model's weights and of its adapters; None for initial ones."""
    if not isinstance(model, LibraryConfig):
        if given:
            raise ConfigError(
                f"--init-from {given}: `model` is a GPT of Gyre's own, and only weights of models "
                "of transformers are exported. Continue its run with --resume."
            )
        return None, None
    own = Path(model.pretrained) if model.pretrained else None
    if given is None or not pretrained.has_adapters(given):
        return given or own, None
    if not model.lora.rank:
        raise ConfigError(
            f"--init-from {given}: it has adapters, but `model.lora` has rank 0; set `model.lora` "
            "as in the run that it is from"
        )
    return own, given


def encode_frozen(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Encode the linear layers of a rotated model as the configuration says; all but the head.

    Args:
        model: with values, and with its adapters.
        config: of the run.
        mesh: the mesh of the model.

    Raises:
        ConfigError: it has no linear layers that rotate by themselves.
    """
    to = config.model.lora.frozen
    if to not in ("int8", "nf4"):
        return
    head = model.get_output_embeddings()  # type: ignore[operator]
    heads = [path.rpartition(".")[2] for path, each in model.named_modules() if each is head]
    try:
        quantize_frozen(model, to, mesh=mesh, keep=heads)
    except RotationError as error:
        raise ConfigError(f"`model.lora.frozen` is {to}, but {error}; leave it out") from error


def add_adapters(model: nn.Module, config: TrainConfig) -> None:
    """Put the configured adapters into the model, if there are any.

    They rest in float32 whatever the frozen weights have: in bfloat16 most updates would be lost,
    unless they are rounded at random.

    Raises:
        ConfigError: as `adapt`.
    """
    if isinstance(config.model, LibraryConfig) and config.model.lora.rank:
        adapt(model, config.model.lora, config.run.seed, config.model.pretrained)
        resting = torch.bfloat16 if config.optimizer.stochastic_rounding else torch.float32
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(resting)
