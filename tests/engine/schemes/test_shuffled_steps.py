"""Steps of WS Algorithm 1 are accounted as they were planned, or not taken; epsilon is about what can move, and where to."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.shuffled_runs import in_record
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, WeightShuffling
from opacus_shuffle.accountants.compute import privacy_bound

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


def parts():
    network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    data = TensorDataset(torch.randn(60, 8), torch.randint(3, (60,)))
    return network, torch.optim.SGD(network.parameters(), lr=0.1), DataLoader(data, batch_size=6)


def made(engine, **options):
    network, sgd, loader = parts()
    return engine.make_private(
        module=network,
        optimizer=sgd,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **in_record(**options),
    )


def one_step(model, optimizer, loader):
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return


def test_the_exact_pair_is_about_the_places_that_the_network_s_permutations_reach():
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine, shuffle_weights=True)
    one_step(model, optimizer, loader)
    # An entry of either layer can get to as many places as there are hidden units, 4, and not to
    # all 48 that move.
    (settings,) = engine.privacy_report(1e-5).to_dict()["settings"]
    assert (settings["dimension"], settings["orbit"]) == (48, 4)
    run = {
        "noise_multiplier": 1.0,
        "num_users": 60,
        "steps": 1,
        "sample_rate": 0.1,
        "delta": 1e-5,
        "bound": "pair",
    }
    narrow, wide = (privacy_bound("shuffled_fw", dimension=d, **run).epsilon for d in (4, 48))
    assert engine.get_epsilon(1e-5, bound="pair") == narrow > wide


@pytest.mark.parametrize(
    "spoil",
    [
        lambda optimizer, model: setattr(optimizer, "batch_clip", math.inf),
        lambda optimizer, model: setattr(optimizer, "unshuffled_noise_ratio", 1.0),
        lambda optimizer, model: model.get_parameter("_module.2.weight").requires_grad_(False),
    ],
)
def test_what_changes_the_sum_after_make_private_is_refused_at_the_step(spoil):
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine, shuffle_weights=True, unshuffled_noise_multiplier=5.0)
    one_step(model, optimizer, loader)
    spoil(optimizer, model)
    with pytest.raises(
        ValueError,
        match=r"after make_private: shuffled_fw accounts|frozen or thawed after",
    ):
        one_step(model, optimizer, loader)
    assert len(engine.accountant) == 1


def test_noise_for_parameters_that_stay_is_refused_where_none_stay():
    network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    loader = parts()[2]
    with pytest.raises(
        ValueError, match=r"unshuffled_noise_multiplier=5\.0 is for parameters that stay"
    ):
        PrivacyEngine(accountant="shuffled_fw").make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            shuffle_weights=WeightShuffling(unshuffled_noise_multiplier=5.0),
        )


def test_a_checkpoint_of_other_weights_loads_nothing(tmp_path):
    saved = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(saved, shuffle_weights=True, batch_clip=0.5)
    one_step(model, optimizer, loader)
    saved.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    other = PrivacyEngine(accountant="shuffled_fw")
    network, optimizer, _ = made(other, shuffle_weights=True, batch_clip=0.25)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match="state_dict speaks of"):
        other.load_checkpoint(path=tmp_path / "run.pt", module=network, optimizer=optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_clipping_of_sums_that_is_switched_off_is_noticed():
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine, shuffle_weights=True)
    optimizer.shuffled = frozenset()
    with pytest.raises(ValueError, match="shuffled_fw accounts for what make_private found"):
        one_step(model, optimizer, loader)


def test_without_shuffling_the_clipping_norm_may_change():
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = made(engine)
    optimizer.max_grad_norm = 0.5
    one_step(model, optimizer, loader)
    assert len(engine.accountant) == 1


def test_whoever_forgets_to_shuffle_is_told():
    with pytest.warns(UserWarning, match="shuffled_fw without shuffle_weights is plain DP-SGD"):
        made(PrivacyEngine(accountant="shuffled_fw"))
