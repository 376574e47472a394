"""What a sum is divided by is made of public numbers alone (Opacus's issue 819), so it tells nothing of any record."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ACCOUNTANTS = [
    "shuffle_gauss",
    "subsampled_shuffle",
    "shuffled_checkin",
    "shuffled_fw",
    "shuffled_sums",
]
RECORDS, BATCH, STEPS = 50, 8, 21  # ⌊50/7⌋ is 7, and so is round(50/7)


def released(accountant, x, y, *, seed=1, noise_multiplier=1.0):
    """Every released gradient, the number of records behind it, and the optimizer."""
    module = nn.Linear(5, 3, bias=False)
    nn.init.constant_(module.weight, 0.1)
    engine = PrivacyEngine(accountant=accountant, seed=seed)
    model, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
    )
    gradients, sizes = [], []
    while len(sizes) < STEPS:
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            gradients.append(module.weight.grad.clone())
            sizes.append(len(labels))
    return gradients, sizes, optimizer


def data(seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(RECORDS, 5, generator=draws), torch.randint(
        0, 3, (RECORDS,), generator=draws
    )


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_record_that_becomes_zero_moves_a_release_by_its_own_clipped_gradient_over_a_public_number(
    accountant,
):
    (x, y), neighbour = data(), data()[0]
    neighbour[0] = 0.0  # a gradient of zero: the neighbour of zero-out adjacency
    ours, sizes, optimizer = released(accountant, x, y)
    theirs, again, other = released(accountant, neighbour, y)
    assert sizes == again
    assert optimizer.expected_batch_size == other.expected_batch_size
    moved = [
        float((one - two).norm()) * optimizer.expected_batch_size
        for one, two in zip(ours, theirs, strict=True)
    ]
    grid = 0.5 if accountant == "shuffled_sums" else 0.0  # what random rounding adds to a report
    assert max(moved) <= 1.0 + grid + 1e-4
    assert any(each > 0.1 for each in moved)
    if (
        BATCH < RECORDS and accountant != "shuffled_sums"
    ):  # with the record's turn to be rounded, all later draws move
        assert any(each == 0.0 for each in moved)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_divisor_depends_on_the_numbers_of_records_and_of_batches_and_on_nothing_of_a_batch(
    accountant,
):
    _, sizes, optimizer = released(accountant, *data())
    _, others, another = released(accountant, *data(1), seed=5)
    if accountant in ("shuffled_checkin", "shuffled_fw", "shuffled_sums"):
        assert sizes != others
        assert len(set(sizes)) > 1
        assert optimizer.expected_batch_size == another.expected_batch_size == round(RECORDS / 7)
    else:
        assert (
            {*sizes, *others}
            == {BATCH}
            == {optimizer.expected_batch_size, another.expected_batch_size}
        )


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "shuffled_fw"])
def test_noise_over_the_divisor_is_all_that_is_seen_where_all_records_are_zero_however_many_came(
    accountant,
):
    gradients, sizes, _ = released(accountant, torch.zeros(RECORDS, 5), data()[1])
    halves = {
        large: [each for each, size in zip(gradients, sizes, strict=True) if (size > 7) is large]
        for large in (True, False)
    }
    first, second = (float(torch.stack(each).std()) for each in halves.values())
    assert first == pytest.approx(second, rel=0.3)
    assert float(torch.stack(gradients).std()) * 7 == pytest.approx(1.0, rel=0.15)
