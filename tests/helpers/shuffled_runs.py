"""Short private runs, shuffled and not, that can be compared entry by entry.

A run is repeatable: its weights, its batches and, if any, its noise come from seeds of its own, and
so do its permutations, which :func:`unshuffle` draws once more to take them back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import toy as small_runs
from helpers.model_zoo import Wired
from helpers.private_runs import Run
from opacus_shuffle import PermutationSpec, WeightShuffling, find_permutations, prepare_model

SHUFFLE_SEED = 20_260_101
RECORDS, BATCH, EPOCHS = 32, 8, 2

EXACT = 1e-12
"""What may be between a run and the same run with its units in another order, in double precision.

Sums of some hundred terms of size at most 1 differ by about 1e-14 when their order does, and so do
clipped gradients, whose norm is at most 1. :data:`OPTIMIZERS` turn a difference of gradients into
one of weights at most 1 times as large (learning rates are at most epsilon, or 0.1 with plain
gradients), 10 times with momentum; some ten steps leave it below 1e-12.
"""

# Networks
# ----------------------------------------------------------------------------------------------


def attend(net: Wired, x: torch.Tensor) -> torch.Tensor:
    """Self-attention of plain linear layers, with two heads."""
    query, key, value = (
        layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (net.query, net.key, net.value)
    )
    mixed = nn.functional.scaled_dot_product_attention(query, key, value)
    return net.out(mixed.transpose(1, 2).flatten(2))


def encode(net: Wired, x: torch.Tensor) -> torch.Tensor:
    """One block of a transformer on sequences of feature vectors, and a head on their mean."""
    x = net.embed(x)
    x = x + net.attention(net.first(x))
    return net.head((x + net.block(net.second(x))).mean(1))


def scale_units(net: Wired, x: torch.Tensor) -> torch.Tensor:
    """One layer under two names, and units with a buffer that each pass assigns anew."""
    scale = net.scale.clone()
    if net.training and len(x):
        net.scale = 0.9 * net.scale + 0.1 * net.one.weight.detach().abs().mean(1)
    return net.out(net.again(net.middle(torch.tanh(net.one(x) * scale))))


def encoder() -> nn.Module:
    projections = {name: nn.Linear(8, 8) for name in ("query", "key", "value", "out")}
    return Wired(
        encode,
        embed=nn.Linear(5, 8),
        attention=Wired(attend, **projections),
        first=nn.LayerNorm(8),
        second=nn.LayerNorm(8),
        block=nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)),
        head=nn.Linear(8, 3),
    )


def adapter(features_in: int, features_out: int) -> nn.Module:
    """A frozen layer with a trainable correction of low rank."""
    return Wired(
        lambda net, x: net.base(x) + net.up(net.down(x)),
        base=nn.Linear(features_in, features_out).requires_grad_(False),
        down=nn.Linear(features_in, 4, bias=False),
        up=nn.Linear(4, features_out, bias=False),
    )


def buffered() -> nn.Module:
    middle = nn.Linear(16, 16)
    layers = {"one": nn.Linear(5, 16), "middle": middle, "again": middle, "out": nn.Linear(16, 3)}
    network = Wired(scale_units, **layers)
    network.register_buffer("scale", torch.rand(16))
    return network


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.Tanh(),
        nn.Linear(12, 3),
    )


def low_rank() -> nn.Module:
    return nn.Sequential(adapter(5, 12), nn.Tanh(), adapter(12, 10), nn.Tanh(), adapter(10, 3))


def gpt2() -> nn.Module:
    """With input embeddings that are its output layer's weights, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
    off = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **off)
    return prepare_model(transformers.GPT2LMHeadModel(config))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "conv": conv,
    "encoder": encoder,
    "gpt2": gpt2,
    "low rank": low_rank,
    "buffered": buffered,
}


def build(name: str) -> nn.Module:
    """A network in double precision with weights that are neither 0 nor 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = NETWORKS[name]().double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return small_runs.here(network)


def records(name: str, count: int = RECORDS, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs and targets for a network."""
    generator = torch.Generator().manual_seed(2)
    if name == "gpt2":
        x = torch.randint(20, (count, 6), generator=generator)
    else:
        shape = {"conv": (1, 6, 6), "encoder": (4, 5)}.get(name, (5,))
        x = torch.randn((count, *shape), generator=generator, dtype=torch.float64).to(dtype)
    y = x if name == "gpt2" else torch.randint(3, (count,), generator=generator)
    return TensorDataset(*small_runs.here((x, y)))


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model says, classes in the second dimension."""
    output = model(x)
    output = getattr(output, "logits", output)
    return output.transpose(1, 2) if output.dim() == 3 else output


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03, eps=0.03),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.03, eps=0.03, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.03, eps=0.03, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.03, eps=0.03),
}


def in_record(**keywords: Any) -> dict[str, Any]:
    """The same keywords of ``make_private``, those about shuffling in the record that it takes."""
    fields = {
        name: keywords.pop(name)
        for name in ("batch_clip", "unshuffled_noise_multiplier")
        if name in keywords
    }
    if "shuffle_generator" in keywords:
        fields["generator"] = keywords.pop("shuffle_generator")
    if fields:
        keywords["shuffle_weights"] = WeightShuffling(
            groups=keywords.get("shuffle_weights", False), **fields
        )
    return keywords


# Runs
# ----------------------------------------------------------------------------------------------


@functools.cache
def spec_of(name: str, level: str = "residual") -> PermutationSpec:
    """What of a network may move: found once for all tests that use it."""
    return find_permutations(build(name), records(name)[:2][0], groups=level)


class SeededRun(Run):
    """A run from seeds, without noise by default, whose permutations can be drawn once more."""

    def __init__(
        self,
        name: str = "mlp",
        *,
        shuffle: bool | str | PermutationSpec = False,
        network: nn.Module | None = None,
        data: Any = None,
        optimizer: str | Callable[[Any], torch.optim.Optimizer] = "Nesterov",
        accountant: str = "rdp",
        sigma: float = 0.0,
        own_generator: bool = True,
        **options: Any,
    ) -> None:
        network = build(name) if network is None else network
        data = records(name, dtype=next(network.parameters()).dtype) if data is None else data
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        toy = {
            "module": network,
            "optimizer": make([tensor for tensor in network.parameters() if tensor.requires_grad]),
            "data_loader": DataLoader(
                data, batch_size=BATCH, generator=torch.Generator().manual_seed(3)
            ),
            "max_grad_norm": options.pop("max_grad_norm", 1.0),
        }
        if shuffle is not False:
            options["shuffle_weights"] = shuffle
            if own_generator:
                options["shuffle_generator"] = torch.Generator().manual_seed(SHUFFLE_SEED)
        options.setdefault("noise_generator", small_runs.generator_here(4))
        super().__init__(accountant, sigma=sigma, toy=toy, **in_record(**options))

    @property
    def shuffler(self) -> Any:
        """What moves the weights."""
        return self.engine.shuffler

    def backward(self, batch: Any = None) -> None:
        """Gradients of a batch, by default of the next one."""
        x, y = small_runs.here(self.batch() if batch is None else batch)
        self.criterion(logits(self.model, x), y).backward()

    def fit(
        self,
        epochs: int = EPOCHS,
        *,
        physical: int | None = None,
        accumulate: int = 1,
        after: Any = None,
    ) -> SeededRun:
        """Ordinary epochs, which keep the last step's gradients; ``after`` is called every step."""
        self.model.train()
        with self.split(physical) if physical else contextlib.nullcontext(self.loader) as loader:
            for _ in range(epochs):
                for number, batch in enumerate(loader):
                    if number % accumulate == 0:
                        self.optimizer.zero_grad()
                    self.backward(batch)
                    if (number + 1) % accumulate == 0:
                        self.optimizer.step()
                        if after is not None:
                            after()
        return self

    def contents(self) -> dict[str, torch.Tensor]:
        """Copies of all that the run has got to: weights, buffers, gradients, optimizer state."""
        contents = dict(self.network.named_buffers(remove_duplicate=False))
        for name, parameter in self.network.named_parameters():
            state = {"gradient": parameter.grad, **self.plain.state.get(parameter, {})}
            contents[name] = parameter
            contents |= {f"{name} ({key})": value for key, value in state.items()}
        return {
            name: tensor.detach().clone()
            for name, tensor in contents.items()
            if isinstance(tensor, torch.Tensor)
        }

    def unshuffle(self) -> None:
        """Takes all permutations back, from weights, buffers, gradients and optimizer state."""
        for plan in inverses(self.shuffler):
            self.shuffler.spec.apply_(self.network, plan, self.plain)


def drawn(shuffler: Any) -> list[Any]:
    """All permutations that a shuffler has drawn so far, drawn once more."""
    generator = torch.Generator().manual_seed(SHUFFLE_SEED)
    return [shuffler.spec.sample(generator) for _ in range(shuffler.shuffles)]


def inverses(shuffler: Any) -> list[Any]:
    """The permutations that take back what a shuffler has done, the first one first."""
    return [shuffler.spec.invert(plan) for plan in reversed(drawn(shuffler))]


def moved(
    spec: PermutationSpec, plans: list[Any], contents: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Contents or weights, as permutations make them, one after another."""
    copies = {key: tensor.clone() for key, tensor in contents.items()}
    for key, tensor in copies.items():
        name = key.partition(" ")[0]
        if name in spec.blocks and tensor.dim():
            for plan in plans:
                spec.move({name: [tensor]}, plan)
    return copies


def distance(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference between entries."""
    assert ones.keys() == others.keys()
    return max(
        float((one.double() - others[name].double()).abs().max())
        for name, one in ones.items()
        if one.numel()
    )


def weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
