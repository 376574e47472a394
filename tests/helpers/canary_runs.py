"""Small private runs for the tests of canaries and audits."""

import itertools

import opacus
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle
from helpers.shuffled_runs import in_record
from opacus_shuffle.audit.training_audit import audit_training
from opacus_shuffle.networks.running import unwrap

DELTA = 1e-5


def private(
    engine="rdp",
    *,
    sizes=(5, 8, 3),
    sigma=1.0,
    seed=0,
    mode="hooks",
    sgd=None,
    batch_size=8,
    dtype=torch.float64,
    stock=False,
    **options,
):
    """Returns a small private run with fixed seeds, as keyword arguments of audit_training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2])]
        module = nn.Sequential(*layers).to(dtype)
        data = TensorDataset(torch.randn(64, sizes[0], dtype=dtype), torch.randint(sizes[2], (64,)))
    engine = (
        opacus.PrivacyEngine(accountant=engine)
        if stock
        else opacus_shuffle.PrivacyEngine(accountant=engine)
    )
    if options.get("shuffle_weights"):
        options.setdefault("shuffle_generator", torch.Generator().manual_seed(seed + 1))
    results = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1)
        if sgd is None
        else sgd(module.parameters()),
        data_loader=DataLoader(
            data, batch_size=batch_size, generator=torch.Generator().manual_seed(seed + 2)
        ),
        noise_multiplier=sigma,
        max_grad_norm=options.pop("max_grad_norm", 1.0),
        noise_generator=torch.Generator().manual_seed(seed + 3),
        grad_sample_mode=mode,
        **({"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}),
        **in_record(**options),
    )
    model, optimizer, loader = results[0], results[1], results[-1]
    criterion = results[2] if mode == "ghost" else cross_entropy
    return {
        "model": model,
        "optimizer": optimizer,
        "data_loader": loader,
        "engine": engine,
        "loss": lambda model, batch: criterion(model(batch[0]), batch[1]),
    }


def audit(run, steps=100, **options):
    run = {name: value for name, value in run.items() if name != "engine"}
    options = {"delta": DELTA, "generator": torch.Generator().manual_seed(9), **options}
    return audit_training(**run, steps=steps, **options)


def steps_of(run, count):
    """Takes ordinary training steps."""
    batches = itertools.chain.from_iterable(itertools.repeat(run["data_loader"]))
    for batch in itertools.islice(batches, count):
        run["optimizer"].zero_grad()
        run["loss"](run["model"], batch).backward()
        run["optimizer"].step()


def accounted(run):
    """Returns the number of accounted steps."""
    return sum(count for *_, count in run["engine"].accountant.history)


def weight(run, name="0.weight"):
    return dict(unwrap(run["model"]).named_parameters())[name]
