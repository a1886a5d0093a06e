"""Layers, weights, hooks and outputs as people have them in their own models."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.rtp.tried.own import DIM, HIDDEN, TOKENS, VOCABULARY, Own
from benchmarks.rtp.tried.own_models import NanoBlock, ReferenceFeedForward


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(DIM, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(self.width(options), DIM)

    @staticmethod
    def width(options: dict[str, Any]) -> int:
        return int(options.get("proj_size") or HIDDEN) * (2 if options.get("bidirectional") else 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])


class PackedRecurrent(nn.Module):
    """An LSTM on a packed sequence, with a cell after it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.cell = nn.LSTM(DIM, HIDDEN, batch_first=True), nn.GRUCell(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, torch.full((len(x),), TOKENS), batch_first=True
        )
        _, (hidden, _) = self.rnn(packed)
        return self.cell(hidden[-1])


class Pairwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(DIM, DIM, HIDDEN)
        self.activation = nn.PReLU(TOKENS)

    def forward(self, x: Tensor) -> Any:
        return self.activation(self.bilinear(x, x.flip(1)))


class Convolutions(nn.Module):
    """Down and up again, with the statistics of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)
        self.groups = nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Any:
        images = x.flatten(1)[:, :48].reshape(len(x), 3, 4, 4)
        return self.groups(self.up(self.depth(self.norm(self.down(images)).relu())))


class Normed(nn.Module):
    """Weights computed from others: torch's old and new weight norm, and spectral norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.Linear(DIM, HIDDEN)
        if kind == "old":
            layer = weight_norm(layer)
        elif kind == "old spectral":
            layer = nn.utils.spectral_norm(layer)
        else:
            layer = getattr(parametrizations, kind)(layer)
        self.first, self.second = layer, nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).tanh())


class Shared(nn.Module):
    """One weight in three modules, one of which is transposed by hand; a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN)
        self.two.weight = self.one.weight
        self.again = self.two
        self.out = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Any:
        y = self.out(self.one(x).relu() + self.two(x[:, :1]))
        return F.linear(self.again(y), self.one.weight.t())


class WithoutGradients(nn.Module):
    """A frozen teacher under `no_grad`, and one that its own training pays no heed to."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM))
        self.student = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            aim = self.teacher(x)
        return F.mse_loss(self.student(x), aim)


@dataclass
class Output:
    hidden: Tensor
    nothing: None = None


class Pair(NamedTuple):
    one: Tensor
    other: tuple[Tensor, None]


class Returns(nn.Module):
    """Dataclasses, dicts, named tuples and None, between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Structured(form) for form in ("dataclass", "dict", "named")])

    def forward(self, x: Tensor) -> Any:
        first = self.inner[0](x).hidden
        second = self.inner[1](first)["hidden"]
        third = self.inner[2](second)
        return {"a": third.one, "b": [third.other[0], None]}


class Structured(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Any:
        y = self.down(self.up(x).relu())
        match self.form:
            case "dataclass":
                return Output(y)
            case "dict":
                return {"hidden": y, "nothing": None}
        return Pair(y, (2 * y, None))


class Hooked(nn.Module):
    """Hooks of the user's, from before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM))
        self.second = nn.Linear(DIM, DIM)
        self.third = ReferenceFeedForward()
        self.first.register_forward_pre_hook(self._doubled, with_kwargs=True)
        self.second.register_forward_hook(lambda module, args, output: output + args[0])
        self.second.register_full_backward_hook(self._halved)
        self.third.register_full_backward_pre_hook(self._tripled)
        self.third.register_full_backward_hook(self._halved)
        self.first[0].register_full_backward_hook(self._halved)

    @staticmethod
    def _doubled(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {name: 2 * value for name, value in kwargs.items()}

    @staticmethod
    def _tripled(module: Any, grads: Any) -> Any:
        return (grads[0] * 3,)

    @staticmethod
    def _halved(module: Any, grads: Any, outputs: Any) -> Any:
        return tuple(None if each is None else each / 2 for each in grads)

    def forward(self, x: Tensor) -> Any:
        return self.third(self.second(self.first(input=x)))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(VOCABULARY, DIM), nn.Embedding(VOCABULARY, DIM)

    def forward(self, tokens: Tensor) -> Any:
        return self.bag(tokens) @ self.table.weight.T


class AdaptiveSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(DIM, VOCABULARY, [10, 20], div_value=2.0)

    def forward(self, tokens: Tensor) -> Any:
        return self.loss(self.table(tokens).flatten(0, 1), tokens.flatten()).loss


class Checkpointed(nn.Module):
    """A checkpoint of torch around a block."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.block = reentrant, NanoBlock()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x.requires_grad_(), use_reentrant=self.reentrant)


class Lists(nn.Module):
    """Layers in a list without a ModuleList's forward, a dict, and a lambda over them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleDict(
            {"a": nn.Linear(DIM, DIM), "b": nn.ModuleList([nn.Linear(DIM, DIM)])}
        )
        self.weights = nn.ParameterDict({"w": nn.Parameter(torch.randn(DIM, HIDDEN))})
        self.more = nn.ParameterList([nn.Parameter(torch.randn(HIDDEN, DIM))])

    def forward(self, x: Tensor) -> Any:
        y = self.parts["b"][0](self.parts["a"](x))
        return y @ self.weights["w"] @ self.more[0]


class Penalised(nn.Module):
    """A loss with the squares of its weights, read in the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x).square().mean() + 1e-2 * sum(
            each.square().sum() for each in self.parameters()
        )


OWN_LAYERS = {
    "nn.LSTM": Own(lambda: Recurrent("LSTM")),
    "nn.LSTM, two layers, both ways": Own(
        lambda: Recurrent("LSTM", num_layers=2, bidirectional=True)
    ),
    "nn.LSTM, projected": Own(lambda: Recurrent("LSTM", proj_size=8)),
    "nn.GRU": Own(lambda: Recurrent("GRU")),
    "nn.RNN": Own(lambda: Recurrent("RNN")),
    "nn.LSTM, packed sequence": Own(PackedRecurrent),
    "nn.Bilinear": Own(Pairwise),
    "convolutions": Own(Convolutions, alike=True),
    "weight norm": Own(lambda: Normed("weight_norm")),
    "weight norm, old": Own(lambda: Normed("old")),
    "spectral norm": Own(lambda: Normed("spectral_norm"), alike=True),
    "spectral norm, old": Own(lambda: Normed("old spectral"), alike=True),
    "orthogonal": Own(lambda: Normed("orthogonal")),
    "shared weights": Own(Shared),
    "no_grad": Own(WithoutGradients),
    "outputs of all forms": Own(Returns),
    "hooks from before": Own(Hooked),
    "EmbeddingBag": Own(Bag, "tokens"),
    "adaptive softmax": Own(AdaptiveSoftmax, "tokens"),
    "checkpoint": Own(lambda: Checkpointed(reentrant=False)),
    "checkpoint, reentrant": Own(lambda: Checkpointed(reentrant=True)),
    "dicts and lists": Own(Lists),
    "weights in the loss": Own(Penalised),
}
