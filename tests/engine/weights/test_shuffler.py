"""What a weight shuffler refuses, and that loading what was just shown is no change."""

from __future__ import annotations

import pytest
import torch
from helpers.perceptron import X, mlp

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import PermutationSpec, find_permutations


class HoldsTensors(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.averages = [each.detach().clone() for group in self.param_groups for each in group["params"]]


def test_shufflers_that_could_not_do_their_work_are_refused():
    network, other = mlp(), mlp()
    spec = find_permutations(network, X)
    with pytest.raises(ValueError, match="trains none of the parameters"):
        WeightShuffler(network, spec, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="averages"):
        WeightShuffler(network, spec, HoldsTensors(network.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="moves nothing"):
        WeightShuffler(network, PermutationSpec((), {}, {}), torch.optim.SGD(network.parameters(), lr=0.1))


@pytest.mark.parametrize("what", ["network", "part", "optimizer", "both"])
def test_loading_what_was_just_shown_is_no_change(what):
    def trained(reload):
        network = mlp().double()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        shuffler = WeightShuffler(network, find_permutations(network, X.double()), optimizer, mode="on_release")
        for step in range(4):
            network(X.double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and reload:
                shown = network.state_dict(), optimizer.state_dict()
                if what in ("network", "both"):
                    network.load_state_dict(shown[0])
                if what == "part":
                    network[2].load_state_dict(network[2].state_dict())
                if what in ("optimizer", "both"):
                    optimizer.load_state_dict(shown[1])
                again = network.state_dict()
                assert all(torch.equal(again[name], value) for name, value in shown[0].items())
                assert shuffler.shuffles == 1
        return network(X.double()).detach()

    assert float((trained(False) - trained(True)).abs().max()) < 1e-12
