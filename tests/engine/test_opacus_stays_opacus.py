"""With Opacus's accountants and no flag of ours the engine is Opacus: bit for bit, by its tests."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import opacus
import pytest
import torch
from helpers.model_zoo import Wired
from opacus.layers import DPLSTM
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import wrap_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore")
slow = pytest.mark.slow


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
    "words": lambda: nn.Sequential(
        Wired(lambda _, x: (x.abs() * 3).long() % 7),
        nn.Embedding(7, 4),
        nn.Flatten(),
        nn.Linear(64, 2),
    ),
    "rows": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)
    ),
    "sequences": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)),
        DPLSTM(4, 5, batch_first=True),
        Wired(lambda _, states: states[0][:, -1]),  # after the last step
        nn.Linear(5, 2),
    ),
}
OPTIMIZERS = {
    "momentum": lambda network: torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda network: torch.optim.AdamW(network.parameters(), lr=0.01),
    "groups": lambda network: torch.optim.SGD(
        [{"params": [parameter], "lr": 0.1} for parameter in network.parameters()]
    ),
}
SCHEDULERS = {
    "noise": lambda optimizer: ExponentialNoise(optimizer, gamma=0.9),
    "clip": lambda optimizer: ExponentialGradClip(optimizer, gamma=0.9),
    "rate": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
}
CLIPPINGS = {
    "flat": {"max_grad_norm": 0.7},
    "per_layer": {},
    "adaptive": {
        "max_grad_norm": 0.7,
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.1,
        "unclipped_num_std": 1.0,
    },
}


def seen(
    engine_class,
    place,
    *,
    network="dropout",
    records=60,
    batch_size=7,
    loader=None,
    optimizer="momentum",
    accountant="gdp",  # the fastest to ask
    clipping="flat",
    mode="hooks",
    epochs=2,
    physical=None,
    schedulers=(),
    checkpoint=False,
    generators=False,
    **options,
):
    """Batches and weights of a run, PyTorch's generator at its end, and what was accounted."""
    torch.manual_seed(3)
    module = NETWORKS[network]()
    data = TensorDataset(torch.randn(records, 16), torch.randint(0, 2, (records,)))
    norms = {"max_grad_norm": [0.5] * len(list(module.parameters())), **CLIPPINGS[clipping]}
    loss = nn.CrossEntropyLoss(reduction=options.get("loss_reduction", "mean"))
    own = torch.Generator().manual_seed(5) if generators else None
    if generators:
        options["noise_generator"] = torch.Generator().manual_seed(6)
    asked = {"epochs": epochs} if "target_epsilon" in options else {"noise_multiplier": 1.1}
    torch.manual_seed(11)
    engine = engine_class(accountant=accountant)
    make = "make_private_with_epsilon" if "target_epsilon" in options else "make_private"
    made = getattr(engine, make)(
        module=module,
        optimizer=OPTIMIZERS[optimizer](module),
        data_loader=DataLoader(data, batch_size=batch_size, generator=own, **(loader or {})),
        clipping=clipping,
        grad_sample_mode=mode,
        criterion=loss,
        **norms,
        **{**asked, **options},
    )
    model, private, batches = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else loss
    trained = model if options.get("wrap_model", True) else module
    started = [SCHEDULERS[name](private) for name in schedulers]
    seen_tensors = []

    if physical:
        batches = wrap_data_loader(data_loader=batches, max_batch_size=physical, optimizer=private)
    for _ in range(epochs):
        for x, y in batches:
            private.zero_grad()
            criterion(trained(x), y).backward()
            private.step()
            seen_tensors += [x, *(one.detach().clone() for one in module.parameters())]
        for scheduler in started:
            scheduler.step()
        if checkpoint:
            path = place / f"{engine_class.__module__}.pt"
            engine.save_checkpoint(path=path, module=model, optimizer=private)
            own_rule = {"allow_rewind": True} if engine_class is PrivacyEngine else {}
            engine.load_checkpoint(path=path, module=model, optimizer=private, **own_rule)
    told = (len(batches), private.noise_multiplier, float(private.max_grad_norm))
    spent = engine.accountant.history, private.expected_batch_size, engine.get_epsilon(1e-5)
    return [*seen_tensors, torch.get_rng_state()], (*told, *spent)


MODES = ("hooks", "functorch", "ew", "ghost")
RUNS = [
    {},
    {"records": 98, "batch_size": 2, "epochs": 1},  # an expected batch size of 1
    {"accountant": "rdp", "physical": 3, "schedulers": ("noise", "clip", "rate")},
    {"poisson_sampling": False, "loader": {"shuffle": True}, "mode": "ew"},
    {"mode": "functorch", "batch_size": 20, "network": "pictures"},
    {"mode": "ghost", "batch_size": 20, "optimizer": "AdamW", "wrap_model": False},
    {"mode": "ghost", "batch_size": 20, "network": "rows"},
    {"clipping": "per_layer", "batch_size": 20, "network": "sequences"},
    {"clipping": "adaptive", "batch_size": 20, "optimizer": "groups"},
    {"generators": True, "loss_reduction": "sum"},
    {"target_epsilon": 3.0, "target_delta": 1e-5},
]
ZOO = [
    {"records": 930, "batch_size": 10, "epochs": 1},  # 92 batches
    {"accountant": "prv", "checkpoint": True},
]
SLOW = [
    # In larger batches, for Opacus fails at empty ones here and there.
    *(
        {"network": network, "mode": mode, "batch_size": 20}
        for network in NETWORKS
        for mode in MODES
    ),
    *(
        {"network": network, "clipping": clipping, "batch_size": 20}
        for network in NETWORKS
        for clipping in ("per_layer", "adaptive")
    ),
    *({"poisson_sampling": False, "mode": mode} for mode in MODES),
    *({"optimizer": optimizer, "accountant": "rdp"} for optimizer in OPTIMIZERS),
    *({"physical": 3, "mode": mode} for mode in ("hooks", "functorch", "ghost")),
    *({"physical": 3, "clipping": clipping} for clipping in CLIPPINGS),
    *({"schedulers": (name,), "accountant": "rdp"} for name in SCHEDULERS),
    {"schedulers": ("noise",), "mode": "ghost", "accountant": "rdp"},
    {"checkpoint": True, "mode": "ghost", "optimizer": "AdamW"},
    {"loader": {"num_workers": 2}, "physical": 3},
    {"loader": {"num_workers": 2}, "poisson_sampling": False},
    *({"wrap_model": False, "mode": mode} for mode in ("hooks", "functorch", "ghost")),
    *({"loss_reduction": "sum", "mode": mode} for mode in ("hooks", "ghost")),
    *({"batch_size": size} for size in (1, 59, 60, 100)),
    *({"noise_multiplier": 0.0, "mode": mode, "accountant": "rdp"} for mode in ("hooks", "ghost")),
]


@pytest.mark.parametrize(
    "run",
    [
        *RUNS,
        *(pytest.param(run, marks=pytest.mark.zoo) for run in ZOO),
        *(pytest.param(run, marks=slow) for run in SLOW),
    ],
    ids=str,
)
def test_every_batch_weight_and_random_number_is_that_of_opacus(run, tmp_path):
    (ours, told), (stock, expected) = (
        seen(engine_class, tmp_path, **run)
        for engine_class in (PrivacyEngine, opacus.PrivacyEngine)
    )
    if run.get("clipping") == "adaptive":  # for which Opacus's account is too small
        told, expected = told[:3], expected[:3]
    assert told == expected
    assert len(ours) == len(stock)
    assert all(map(torch.equal, ours, stock))


@pytest.mark.parametrize("name", ["rdp", "prv", "gdp"])
def test_batches_that_opacus_s_accountants_do_not_assume_are_warned_of(name, tmp_path):
    said = f"{name} assumes Poisson samples, .*its ε is no guarantee"
    with pytest.warns(PrivacyAssumptionWarning, match=said):
        seen(PrivacyEngine, tmp_path, accountant=name, poisson_sampling=False, epochs=1)


def test_what_can_be_asked_for_is_what_opacus_has_and_what_the_readme_names():
    more = {
        "make_private": {
            "local_noise",
            "sampling",
            "shuffle_weights",
            "aggregator",
            "report",
            "adaptive",
        },
        "save_checkpoint": set(),
        "load_checkpoint": {"allow_rewind", "allow_pickle"},
    }
    for method, own in more.items():
        ours, theirs = (
            set(inspect.signature(getattr(engine_class, method)).parameters) - {"kwargs"}
            for engine_class in (PrivacyEngine, opacus.PrivacyEngine)
        )
        assert ours == theirs | own


# ---- Opacus's own tests ---------------------------------------------------------------------

FILES = (
    *("privacy_engine_validation_test.py", "batch_memory_manager_test.py", "randomness_test.py"),
    *("gradient_accumulation_test.py", "poisson_test.py", "dpdataloader_test.py", "schedulers"),
    "privacy_engine_test.py",
)
TESTS = Path(__file__).parent.parent
TIME_FIRST = "it trains [time, batch] data without batch_first=False: time steps clipped as records"
EXPECTED = {
    f"privacy_engine_test.py::{name}::test_make_private_with_epsilon": TIME_FIRST
    for name in (
        "PrivacyEngineTextTest",
        "PrivacyEngineTextTestFunctorch",
        "PrivacyEngineTextHooksTest",
    )
}
"""Tests that the stock engine passes and ours must not, with the reason."""


def opacus_s_tests(place):
    """Opacus's tests as a package of their own in a folder; skips where they cannot be had."""
    version = metadata.version("opacus")
    options = ["--no-binary", "opacus", "--no-deps", "--no-build-isolation", "-d", str(place)]
    command = [sys.executable, "-m", "pip", "download", *options, f"opacus=={version}"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    tests = Path(opacus.__file__).parent / "tests"  # wheels have had them
    for archive in place.glob("opacus-*.tar.gz"):
        with tarfile.open(archive) as opened:
            opened.extractall(place, filter="data")
        tests = next(place.glob("opacus-*/opacus/tests"))
    if not (tests / "privacy_engine_test.py").exists():
        reason = (said.stderr or said.stdout).strip().splitlines()[-1:]
        pytest.skip(f"the source distribution of Opacus {version} cannot be fetched: {reason}")
    shutil.copytree(tests, place / "opacus_tests")
    return place


def failures(folder, engine, tests=FILES):
    """What fails, by name, and how many pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore"]
    for plugin in ("helpers.opacus_suite", "no:cacheprovider", "no:xdist"):
        command += ["-p", plugin]
    command += [f"--engine={engine}", "-c", os.devnull, f"--rootdir={folder}"]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, *(f"opacus_tests/{test}" for test in tests)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search("passed|failed", run.stdout.splitlines()[-1]), run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) opacus_tests/(\S+)", run.stdout, flags=re.MULTILINE)
    return failed, int(passed[1]) if passed else 0


@slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("hypothesis", "opt_einsum")),
    reason="Opacus's tests need hypothesis and opt_einsum",
)
def test_opacus_s_own_tests_pass_with_our_engine(tmp_path):
    folder = opacus_s_tests(tmp_path)
    failed, passed = failures(folder, "ours")
    failed = {name for name in failed if name not in EXPECTED}
    if failed:  # by no fault of ours where the stock engine fails as well
        failed -= {*failures(folder, "stock", sorted(failed))[0]}
    assert not failed
    assert passed > 250
