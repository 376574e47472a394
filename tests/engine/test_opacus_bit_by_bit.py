"""What else a run of Opacus is made of is the same bit by bit: networks, optimizers, schedulers, checkpoints, empty batches."""

from __future__ import annotations

import opacus
import pytest
import torch
from opacus.layers import DPLSTM
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CLIPPINGS = {
    "flat": {"max_grad_norm": 0.7},
    "per_layer": {"max_grad_norm": 0.5},  # for each
    "adaptive": {
        "max_grad_norm": 0.7,
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.1,
        "unclipped_num_std": 1.0,
    },
}


class Last(nn.Module):
    def forward(self, x):
        return x[0][:, -1]


class Tokens(nn.Module):
    def forward(self, x):
        return (x.abs() * 3).long() % 7


NETWORKS = {
    "dropout": lambda: nn.Sequential(
        nn.Linear(16, 8), nn.Tanh(), nn.Dropout(), nn.LayerNorm(8), nn.Linear(8, 2)
    ),
    "pictures": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 2),
    ),
    "words": lambda: nn.Sequential(Tokens(), nn.Embedding(7, 4), nn.Flatten(), nn.Linear(64, 2)),
    "sequences": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), DPLSTM(4, 5, batch_first=True), Last(), nn.Linear(5, 2)
    ),
}
OPTIMIZERS = {
    "momentum": lambda network: torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda network: torch.optim.AdamW(network.parameters(), lr=0.01),
    "groups": lambda network: torch.optim.SGD(
        [{"params": [each], "lr": 0.1} for each in network.parameters()]
    ),
}


def seen(
    engine_class,
    place,
    *,
    network="dropout",
    accountant="rdp",
    optimizer="momentum",
    clipping="flat",
    mode="hooks",
    batch_size=7,
    physical=None,
    schedulers=(),
    checkpoint=False,
    workers=0,
    sigma=1.1,
    **options,
):
    """All batches and weights of two epochs, the state of PyTorch's generator, and what was accounted."""
    torch.manual_seed(3)
    module = NETWORKS[network]()
    data = TensorDataset(torch.randn(60, 16), torch.randint(0, 2, (60,)))
    norms = dict(CLIPPINGS[clipping])
    if clipping == "per_layer":
        norms["max_grad_norm"] = [norms["max_grad_norm"]] * len(list(module.parameters()))
    reduction = options.get("loss_reduction", "mean")
    torch.manual_seed(11)
    engine = engine_class(accountant=accountant)
    made = engine.make_private(
        module=module,
        optimizer=OPTIMIZERS[optimizer](module),
        data_loader=DataLoader(data, batch_size=batch_size, num_workers=workers),
        noise_multiplier=sigma,
        clipping=clipping,
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        **norms,
        **options,
    )
    model, private, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss(reduction=reduction)
    trained = model if options.get("wrap_model", True) else module
    changing = {
        "noise": lambda: ExponentialNoise(private, gamma=0.9),
        "clip": lambda: ExponentialGradClip(private, gamma=0.9),
        "rate": lambda: torch.optim.lr_scheduler.StepLR(private, 1, 0.5),
    }
    started = [changing[each]() for each in schedulers]
    found = []

    def train(batches):
        for x, y in batches:
            private.zero_grad()
            criterion(trained(x), y).backward()
            private.step()
            found.extend([x, *(each.detach().clone() for each in module.parameters())])

    for _ in range(2):
        if physical:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=private
            ) as split:
                train(split)
        else:
            train(loader)
        for each in started:
            each.step()
        if checkpoint:
            path = place / f"{engine_class.__module__}.pt"
            engine.save_checkpoint(path=path, module=model, optimizer=private)
            engine.load_checkpoint(path=path, module=model, optimizer=private)
    told = (
        len(loader),
        private.noise_multiplier,
        float(private.max_grad_norm),
        private.expected_batch_size,
    )
    return [*found, torch.get_rng_state()], (
        *told,
        engine.accountant.history,
        engine.get_epsilon(1e-5),
    )


RUNS = [
    # With larger batches, for Opacus fails at empty ones here and there.
    *(
        {"network": each, "mode": mode, "batch_size": 20}
        for each in NETWORKS
        for mode in ("hooks", "functorch", "ew", "ghost")
    ),
    *(
        {"network": each, "clipping": clipping, "batch_size": 20}
        for each in NETWORKS
        for clipping in ("per_layer", "adaptive")
    ),
    *({"poisson_sampling": False, "mode": mode} for mode in ("hooks", "functorch", "ew", "ghost")),
    *({"accountant": accountant} for accountant in ("prv", "gdp")),
    *({"optimizer": optimizer} for optimizer in OPTIMIZERS),
    *({"physical": 3, "mode": mode} for mode in ("hooks", "functorch", "ghost")),
    *({"physical": 3, "clipping": clipping} for clipping in CLIPPINGS),
    *({"schedulers": each} for each in (("noise",), ("clip",), ("rate",), ("noise", "clip"))),
    {"schedulers": ("noise", "clip"), "physical": 3},
    {"schedulers": ("noise",), "mode": "ghost"},
    {"checkpoint": True},
    {"checkpoint": True, "mode": "ghost", "optimizer": "AdamW"},
    {"workers": 2, "physical": 3},
    {"workers": 2, "poisson_sampling": False},
    *({"wrap_model": False, "mode": mode} for mode in ("hooks", "functorch", "ghost")),
    *({"loss_reduction": "sum", "mode": mode} for mode in ("hooks", "ghost")),
    *({"batch_size": size} for size in (1, 59, 60, 100)),
    *({"sigma": 0.0, "mode": mode} for mode in ("hooks", "ghost")),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_batch_and_every_weight_is_that_of_opacus(run, tmp_path):
    (ours, told), (stock, expected) = (
        seen(each, tmp_path, **run) for each in (PrivacyEngine, opacus.PrivacyEngine)
    )
    assert told == expected
    assert len(ours) == len(stock)
    assert all(map(torch.equal, ours, stock))
