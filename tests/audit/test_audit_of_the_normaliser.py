"""An audit of Opacus's issue 819: the divisor of a sum can reveal the presence of a record."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.audit import audit_scores

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]
DELTA, STEPS = 1e-5, 150


def spreads(accountant, records, *, present, seed):
    """Returns the deviation of each released gradient, which reveals its divisor, and ε."""
    x = torch.zeros(records, 400)
    x[0] = float(present)  # A record of zeros has a gradient of zero.
    network = nn.Linear(400, 5, bias=False)
    engine = PrivacyEngine(accountant=accountant, seed=seed)
    model, optimizer, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=4),
        noise_multiplier=4.0,
        max_grad_norm=1.0,
    )
    deviations, epsilon = [], None
    while len(deviations) < STEPS:
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            deviations.append(float(network.weight.grad.std()))
            epsilon = engine.get_epsilon(DELTA) if epsilon is None else epsilon
    return torch.tensor(deviations[:STEPS]), epsilon


def lower_bound(without, with_it):
    return max(
        audit_scores(sign * without, sign * with_it, delta=DELTA, confidence=0.999).epsilon
        for sign in (1.0, -1.0)
    )


@pytest.mark.parametrize(
    "accountant", ["shuffle_gauss", "subsampled_shuffle", "shuffled_checkin", "rdp"]
)
def test_a_divisor_of_public_numbers_does_not_reveal_a_report_of_zero(accountant):
    (zeroed, epsilon), (whole, _) = (
        spreads(accountant, 40, present=present, seed=int(present)) for present in (False, True)
    )
    assert lower_bound(zeroed, whole) <= epsilon


def test_opacus_s_divisor_reveals_a_removed_record_at_any_noise():
    (smaller, _), (whole, epsilon) = (
        spreads("rdp", records, present=False, seed=records) for records in (39, 40)
    )
    assert lower_bound(smaller, whole) > 2 > epsilon
