"""Short private runs, shuffled and not, that can be compared entry by entry.

A run is repeatable: its weights, its batches and, if any, its noise come from seeds of its own, and
so do its permutations, which :func:`unshuffle` draws once more to take them back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, prepare_model
from opacus_shuffle.engine import noise
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec

SHUFFLE_SEED = 20_260_101
RECORDS, BATCH, EPOCHS = 32, 8, 2

EXACT = 1e-12
"""What may be between a run and the same run with its units in another order, in double precision.

Sums of some hundred terms of size at most 1 differ by about 1e-14 when their order does, and so do
clipped gradients, whose norm is at most 1. :data:`OPTIMIZERS` turn a difference of gradients into
one of weights at most 1 times as large (learning rates are at most epsilon, or 0.1 with plain
gradients), 10 times with momentum; some ten steps leave it below 1e-12.
"""

in_order = {"poisson_sampling": False}
"""The loader's own batches, in their order, so that a run can go on where it was."""

# Networks
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention of plain linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(
            nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )


class Encoder(nn.Module):
    """One block of a transformer on sequences of feature vectors, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(5, 8), Attention(8, 2)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.attention(self.first(x))
        x = x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))
        return self.head(x.mean(1))


class LowRank(nn.Module):
    """A frozen layer with a trainable correction of low rank."""

    def __init__(self, features_in: int, features_out: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(features_in, features_out).requires_grad_(False)
        self.down, self.up = (
            nn.Linear(features_in, rank, bias=False),
            nn.Linear(rank, features_out, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Buffered(nn.Module):
    """Units with a buffer that goes with them, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(5, 16), nn.Linear(16, 3)
        self.middle = self.again = nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.again(self.middle(torch.tanh(self.one(x) * self.scale))))


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
    return nn.Sequential(LowRank(5, 12), nn.Tanh(), LowRank(12, 10), nn.Tanh(), LowRank(10, 3))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    config |= {
        "max_position_embeddings": 6,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 3,
    }
    return prepare_model(
        transformers.BertForSequenceClassification(transformers.BertConfig(**config))
    )


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {
        "vocab_size": 20,
        "n_positions": 6,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "use_cache": False,
    }
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    network = prepare_model(transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)))
    assert network.lm_head.weight is network.transformer.wte.weight
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "conv": conv,
    "encoder": Encoder,
    "bert": bert,
    "gpt2": gpt2,
    "low rank": low_rank,
    "buffered": Buffered,
}


def build(name: str) -> nn.Module:
    """A network in double precision with weights that are neither 0 nor 1; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = NETWORKS[name]().double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return network


def records(name: str, count: int = RECORDS, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs and targets for a network."""
    generator = torch.Generator().manual_seed(2)
    if name in ("bert", "gpt2"):
        x = torch.randint(20, (count, 6), generator=generator)
    else:
        shape = {"conv": (1, 6, 6), "encoder": (4, 5)}.get(name, (5,))
        x = torch.randn((count, *shape), generator=generator, dtype=torch.float64).to(dtype)
    y = x if name == "gpt2" else torch.randint(3, (count,), generator=generator)
    return TensorDataset(x, y)


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
STATE = {
    "SGD": set(),
    "Nesterov": {"momentum_buffer"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AMSGrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "RMSprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "Adagrad": {"sum"},
}


def in_record(**keywords: Any) -> dict[str, Any]:
    """The same keywords of ``make_private``, with those about shuffling in the record that it takes."""
    fields = {
        name: keywords.pop(name)
        for name in ("batch_clip", "dimension", "unshuffled_noise_multiplier")
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
# -------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A private set-up; ``model`` is what to call, ``network`` what the weights are in."""

    network: nn.Module
    plain_optimizer: torch.optim.Optimizer
    engine: PrivacyEngine
    model: nn.Module
    returned: Any
    optimizer: Any
    loader: DataLoader
    criterion: Any

    @property
    def shuffler(self) -> WeightShuffler:
        assert self.engine.shuffler is not None
        return self.engine.shuffler

    def train(
        self,
        epochs: int = EPOCHS,
        *,
        physical: int | None = None,
        accumulate: int = 1,
        before: Any = None,
        after: Any = None,
    ) -> Run:
        """Ordinary epochs; the last step's gradients are kept. ``before`` is called after every backward pass, ``after`` after
        every step.
        """
        self.model.train()
        with contextlib.ExitStack() as stack:
            loader = self.loader
            if physical is not None:
                loader = stack.enter_context(
                    BatchMemoryManager(
                        data_loader=loader,
                        max_physical_batch_size=physical,
                        optimizer=self.optimizer,
                    )
                )
            for _ in range(epochs):
                for number, (x, y) in enumerate(loader):
                    if number % accumulate == 0:
                        self.optimizer.zero_grad()
                    self.criterion(logits(self.model, x), y).backward()
                    if before is not None:
                        before()
                    if (number + 1) % accumulate == 0:
                        self.optimizer.step()
                        if after is not None:
                            after()
        return self


def prepare(
    name: str = "mlp",
    *,
    network: nn.Module | None = None,
    data: Any = None,
    shuffle: bool | str | Any = False,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "Nesterov",
    mode: str = "hooks",
    sigma: float = 0.0,
    own_generator: bool = True,
    engine: PrivacyEngine | None = None,
    **options: Any,
) -> Run:
    """A private set-up from seeds."""
    network = build(name) if network is None else network
    data = records(name, dtype=next(network.parameters()).dtype) if data is None else data
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    plain = make([parameter for parameter in network.parameters() if parameter.requires_grad])
    engine = PrivacyEngine(accountant="rdp") if engine is None else engine
    if shuffle is not False:
        options["shuffle_weights"] = shuffle
        if own_generator:
            options["shuffle_generator"] = torch.Generator().manual_seed(SHUFFLE_SEED)
    results = engine.make_private(
        module=network,
        optimizer=plain,
        data_loader=DataLoader(data, batch_size=BATCH, generator=torch.Generator().manual_seed(3)),
        noise_multiplier=sigma,
        max_grad_norm=options.pop("max_grad_norm", 1.0),
        noise_generator=torch.Generator().manual_seed(4),
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(),
        **in_record(**options),
    )
    returned, private_optimizer, loader = results[0], results[1], results[-1]
    criterion = results[2] if mode == "ghost" else nn.CrossEntropyLoss()
    model = returned if isinstance(returned, nn.Module) else network
    return Run(network, plain, engine, model, returned, private_optimizer, loader, criterion)


def drawn_each(shuffler: WeightShuffler, count: int | None = None) -> list[PermutationPlan]:
    """The shuffler's first permutations (all so far), drawn once more."""
    generator = torch.Generator().manual_seed(SHUFFLE_SEED)
    return [
        shuffler.spec.sample(generator)
        for _ in range(shuffler.shuffles if count is None else count)
    ]


def drawn(shuffler: WeightShuffler, count: int | None = None) -> PermutationPlan:
    """Their product."""
    return functools.reduce(
        shuffler.spec.compose, drawn_each(shuffler, count), shuffler.spec.identity()
    )


def unshuffle(run: Run) -> None:
    """Takes all permutations back, from weights, buffers, gradients and optimizer state."""
    spec = run.shuffler.spec
    spec.apply_(run.network, spec.invert(drawn(run.shuffler)), run.plain_optimizer)


def contents(run: Run) -> dict[str, torch.Tensor]:
    """Copies of everything that a run has got to: weights, buffers, gradients, optimizer state."""
    found = dict(run.network.named_buffers(remove_duplicate=False))
    for name, parameter in run.network.named_parameters():
        found[name] = parameter
        if parameter.grad is not None:
            found[f"{name} (gradient)"] = parameter.grad
        for key, value in run.plain_optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name} ({key})"] = value
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def moved(
    spec: PermutationSpec, plan: PermutationPlan, found: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Contents or weights, as a permutation makes them."""
    found = {key: tensor.clone() for key, tensor in found.items()}
    for key, tensor in found.items():
        name = key.partition(" ")[0]
        if name in spec.blocks and tensor.dim():
            spec.move({name: [tensor]}, plan)
    return found


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


@contextlib.contextmanager
def noise_carried_along(run: Run) -> Iterator[None]:
    """While inside, the run's noise is that of the run without shuffling, moved to where the units are."""

    def moved(generate: Any) -> Any:
        def noise_there(
            std: float, reference: torch.Tensor, generator: Any = None, secure_mode: bool = False
        ) -> torch.Tensor:
            made = generate(std, reference, generator, secure_mode)
            for name, tensor in run.shuffler.spec.tensors(run.network).items():
                if getattr(tensor, "summed_grad", None) is reference:
                    run.shuffler.spec.move({name: [made]}, drawn(run.shuffler))
            return made

        return noise_there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "gaussian_noise", moved(noise.gaussian_noise))
        yield
