"""Steps train what was planned: nothing that was frozen or thawed since moves by a gradient that nobody clipped."""

from __future__ import annotations

import pytest
import torch
from helpers.toy import make_toy
from torch import nn

from opacus_shuffle import PrivacyEngine


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("what", ["frozen", "thawed", "all frozen", "exchanged"])
@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp", "shuffled_sums"])
def test_a_parameter_frozen_or_thawed_before_the_step_moves_nothing(accountant, what, mode):
    if accountant == "shuffled_sums" and mode == "ghost":
        mode = "functorch"
    torch.manual_seed(0)
    toy = make_toy(records=8, batch_size=8)
    network = toy["module"]
    network[0].bias.requires_grad_(False)
    made = PrivacyEngine(accountant=accountant)
    private = made.make_private(**toy, noise_multiplier=1.0, grad_sample_mode=mode)
    model, optimizer, loader = private[0], private[1], private[-1]
    criterion = private[2] if mode == "ghost" else nn.CrossEntropyLoss()
    while True:  # Poisson batches may be empty
        x, y = next(iter(loader))
        if len(x):
            break
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    before = [each.detach().clone() for each in network.parameters()]
    if what != "thawed":
        for each in list(network.parameters()) if what == "all frozen" else [network[0].weight]:
            each.requires_grad_(False)
    if what in ("thawed", "exchanged"):
        network[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen or thawed"):
        optimizer.step()
    assert not len(made.accountant)
    assert all(
        torch.equal(one, other) for one, other in zip(before, network.parameters(), strict=True)
    )


def test_a_gradient_left_on_a_frozen_parameter_is_not_released():
    toy = make_toy(records=8, batch_size=8)
    network = toy["module"]
    network(torch.randn(2, 5)).sum().backward()
    network[0].requires_grad_(False)
    model, optimizer, loader = PrivacyEngine(accountant="subsampled_shuffle").make_private(
        **toy, noise_multiplier=1.0
    )
    before = network[0].weight.detach().clone()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(before, network[0].weight)


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_complex_parameters_whose_noise_would_be_half_of_what_is_accounted_are_refused(accountant):
    network = nn.Linear(5, 3, dtype=torch.complex64)
    toy = make_toy() | {
        "module": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
    }
    with pytest.raises(
        ValueError, match=r"optimizer holds complex parameters.*two real parameters"
    ):
        PrivacyEngine(accountant=accountant).make_private(**toy, noise_multiplier=1.0)
    network.requires_grad_(False)
    toy["module"] = nn.Sequential(nn.Linear(5, 5), network)
    toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
    PrivacyEngine(accountant=accountant).make_private(**toy, noise_multiplier=1.0)
