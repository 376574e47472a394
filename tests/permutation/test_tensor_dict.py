"""A dictionary by tensors knows them by identity, while they live."""

import gc

import torch

from opacus_shuffle.permutation.tensor_dict import TensorDict


def test_tensors_are_known_by_identity_and_not_by_value():
    one, same = torch.ones(2), torch.ones(2)
    known = TensorDict()
    known[one] = 1
    assert one in known
    assert same not in known
    assert (known[one], known.get(same), known.get(same, 3)) == (1, None, 3)
    known[one] = 2
    assert known[one] == 2
    assert [*known] == [one]
    del known[one]
    assert one not in known


def test_entries_go_with_their_tensors():
    known = TensorDict()
    for _ in range(100):  # new ones get the places of old ones in memory
        tensor = torch.ones(2)
        assert tensor not in known
        known[tensor] = True
    del tensor
    gc.collect()
    assert not [*known]


def test_entries_stay_where_pytorch_alone_holds_the_tensor():
    known = TensorDict()
    whole = torch.ones(4)
    known[whole] = "whole"
    part = whole[:2]
    del whole
    gc.collect()
    assert known[part._base] == "whole"
