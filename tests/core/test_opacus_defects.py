"""The known defects of Opacus: found by what they do, refused by name, not imagined."""

import contextlib

import opacus
import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.core import opacus_compat
from opacus_shuffle.core.opacus_compat import check_attention, check_ghost_ties


def same_as_pytorch(*, batch_first: bool, heads: int) -> bool:
    """Whether Opacus's attention is that of PyTorch with the same weights."""
    theirs, ours = (
        nn.MultiheadAttention(4, heads, batch_first=batch_first),
        DPMultiheadAttention(4, heads, batch_first=batch_first),
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 4)
    return torch.allclose(theirs(x, x, x)[0], ours(x, x, x)[0], atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_refused_by_its_path_if_it_is_not_that_of_pytorch(heads, batch_first):
    layer = DPMultiheadAttention(4, heads, batch_first=batch_first)
    network = nn.Sequential(nn.MultiheadAttention(4, 2, batch_first=True), nn.ModuleList([layer]))
    right = same_as_pytorch(batch_first=batch_first, heads=heads)
    for module, path in ((network, "1.0"), (layer, "the module itself")):
        message = f"batch_first=True at {path}, which.*#825"
        with contextlib.nullcontext() if right else pytest.raises(ValueError, match=message):
            check_attention(module)


def test_attention_of_an_opacus_with_the_repair_is_taken(monkeypatch):
    monkeypatch.setattr(opacus_compat, "DPMultiheadAttention", nn.MultiheadAttention)
    check_attention(nn.MultiheadAttention(4, 2, batch_first=True))


def test_adaptive_ghost_clipping_does_not_clip():
    """Half of the records have no gradient; a loss averaged too early hands them a share."""
    network = nn.Linear(1, 1, bias=False)
    x = 100 * torch.tensor([0.0, 1.0]).repeat(10)[:, None]
    engine = PrivacyEngineAdaptiveClipping()
    private, _, criterion, _ = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, x), batch_size=20),
        criterion=nn.MSELoss(),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        max_clipbound=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    criterion(private(x), 100 * x).backward()
    assert (
        float(network.weight.grad.norm()) / 20 > 1.01
    )  # what every record would be clipped to is 1


def tied_network() -> nn.Sequential:
    network = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    network[2].weight = network[0].weight
    return network


def test_ghost_clipping_of_tied_parameters_is_refused_as_opacus_does():
    network = tied_network()
    with pytest.raises(
        ValueError,
        match=r"module has tied parameters, 0.weight = 2.weight, .*use grad_sample_mode='hooks'",
    ):
        check_ghost_ties(network)
    engine = opacus.PrivacyEngine()
    data = DataLoader(torch.zeros(4, 2, dtype=torch.long), batch_size=2)
    private, *_ = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=data,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    with pytest.raises(
        NotImplementedError, match="Parameter tying is not supported with Ghost Clipping"
    ):
        private(torch.zeros(2, 2, dtype=torch.long))


def test_frozen_ties_and_layers_with_two_names_are_no_ties_to_train():
    network = tied_network()
    network[0].weight.requires_grad_(False)
    check_ghost_ties(network)
    network = nn.Sequential(nn.Linear(2, 2))
    network.alias = network[0]
    check_ghost_ties(nn.ModuleList([network, nn.Linear(2, 2), DPLSTM(2, 3)]))
