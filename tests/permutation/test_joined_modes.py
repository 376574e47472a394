"""Modes that watch operations join one another, and meet what they would if PyTorch had each of them on its stack."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_shuffle.permutation.higher_order import InsightMode


class Noting(InsightMode):
    """Notes operations as they go in, and does one of its own for each product."""

    def __init__(self, name: str, notes: list[str], *, shows_own: bool = False) -> None:
        super().__init__()
        self._name, self._notes, self._shows_own = name, notes, shows_own

    def meet(self, func, args, kwargs):
        self._notes.append(f"{self._name} {func.overloadpacket.__name__}")
        if func.overloadpacket is torch.ops.aten.mul:
            if self._shows_own:
                with self.outside():
                    args[0].exp()
            else:
                args[0].exp()
        return self.go_on(func, args, kwargs)


class Foreign(TorchDispatchMode):
    """Another library's mode."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._notes.append(f"foreign {func.overloadpacket.__name__}")
        return func(*args, **(kwargs or {}))


def test_the_inner_mode_meets_an_operation_before_the_outer_one_and_pytorch_knows_of_one():
    notes: list[str] = []
    with Noting("outer", notes), Noting("middle", notes), Noting("inner", notes):
        assert torch._C._len_torch_dispatch_stack() == 1
        torch.ones(2).neg()
    assert notes == [f"{mode} {operation}" for operation in ("ones", "neg") for mode in ("inner", "middle", "outer")]
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("shows_own", [False, True])
def test_outer_modes_meet_what_an_inner_one_does_itself_where_it_says_so(shows_own):
    notes: list[str] = []
    x = torch.ones(2)
    with Noting("outer", notes), Noting("middle", notes), Noting("inner", notes, shows_own=shows_own):
        x * x
    own = ["middle exp", "outer exp"] if shows_own else []
    assert notes == ["inner mul", *own, "middle mul", "outer mul"]


def test_modes_that_were_left_meet_nothing_and_those_around_them_go_on():
    notes: list[str] = []
    x = torch.ones(2)
    with Noting("outer", notes):
        with pytest.raises(ValueError, match="on the way"), Noting("inner", notes):
            raise ValueError("on the way")
        x.neg()
        with Noting("next", notes):
            x.exp()
        x.sin()
    x.cos()
    assert notes == ["outer neg", "next exp", "outer exp", "outer sin"]


def test_a_mode_of_somebody_else_between_two_meets_operations_between_them():
    notes: list[str] = []
    x = torch.ones(2)
    with ExitStack() as modes:
        for each in (Noting("outer", notes), Foreign(notes), Noting("middle", notes), Noting("inner", notes)):
            modes.enter_context(each)
        x.neg()
    assert notes == ["inner neg", "middle neg", "foreign neg", "outer neg"]


def test_all_meet_what_functions_do_that_operations_are_given():
    notes: list[str] = []
    with torch.no_grad(), Noting("outer", notes), Noting("inner", notes):
        torch.ops.higher_order.cond(True, torch.neg, torch.exp, (torch.ones(2),))
    assert notes[-2:] == ["inner neg", "outer neg"]
