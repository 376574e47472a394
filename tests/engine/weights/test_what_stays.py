"""Where much of a network cannot move, ``make_private`` says how much, what holds it and what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, find_permutations


class ReturnsHidden(nn.Module):
    """Returns its last hidden units, too, beside what the loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 8), nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.two(torch.relu(self.one(x))))
        return self.three(hidden), hidden


class ReturnsLogits(ReturnsHidden):
    """Does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class ReadsATokenAtTimes(nn.Module):
    """Has a parameter as wide as its first layer that only masked inputs read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 16), nn.Linear(16, 12), nn.Linear(12, 3)
        self.mask_token = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor, masked: bool = False) -> torch.Tensor:
        hidden = torch.relu(self.one(x))
        return self.three(torch.relu(self.two(hidden + self.mask_token if masked else hidden)))


def stays(network: nn.Module, shuffle=True) -> list[str]:
    """The warnings of ``make_private`` about what stays."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PrivacyEngine(accountant="rdp").make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(torch.randn(40, 5), torch.zeros(40)), batch_size=4
            ),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            shuffle_weights=shuffle,
        )
    return [
        str(warning.message)
        for warning in caught
        if "shuffle_weights moves" in str(warning.message)
    ]


def test_the_share_that_moves_and_the_output_that_holds_the_rest_are_named():
    (message,) = stays(ReturnsHidden())
    # The first layer's 8 units move: 5*8 + 8 entries and the 64*8 that read them. 64 and 64*3 + 3
    # are held.
    assert f"moves {560 / 819:.1%} of the parameters of ReturnsHidden" in message
    assert "an output of the network (259 entries)" in message
    assert "return no more than the loss needs" in message


def test_parameters_that_no_record_reaches_are_named_with_the_remedy():
    network = ReadsATokenAtTimes()
    (message,) = stays(network)
    # 12 units move: 16*12 + 12 + 12*3 entries. The token's 16, and all that is as wide as it, are
    # held.
    assert f"moves {240 / 355:.1%} of the parameters of ReadsATokenAtTimes" in message
    assert "as long as an axis of mask_token, which was not reached (96 entries)" in message
    assert "Not reached by the first records: mask_token." in message
    assert "more_samples" in message
    x = torch.randn(2, 5)
    spec = find_permutations(network, x, more_samples=[{"x": x, "masked": True}])
    assert spec.shuffle_ratio(network) > 0.99
    assert stays(ReadsATokenAtTimes(), spec) == []


@pytest.mark.parametrize(
    ("network", "shuffle"),
    [(ReturnsLogits, True), (ReturnsHidden, "paper"), (ReturnsHidden, False)],
)
def test_where_nearly_all_moves_or_less_was_asked_for_nothing_is_said(network, shuffle):
    assert stays(network(), shuffle) == []
