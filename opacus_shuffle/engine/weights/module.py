"""``ShuffleGradSampleModule``: Opacus's wrapper of a network, with shuffled weights.

>>> import torch
>>> from opacus.optimizers import DPOptimizer
>>> private = ShuffleGradSampleModule(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)))
>>> sgd = torch.optim.SGD(private.parameters(), lr=0.1, momentum=0.9)
>>> optimizer = DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=5)
>>> private(torch.randn(5, 4)).square().sum().backward()
>>> optimizer.step()
>>> private.shuffler.shuffles
1
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import nn
from torch.optim.swa_utils import AveragedModel

from opacus_shuffle.engine.pickling import leaving
from opacus_shuffle.engine.weights.shuffler import (
    WeightShuffler,
    attached_shuffler,
    innermost,
    warn_of_another_order,
)
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation.spec import PermutationSpec


class ShuffleGradSampleModule(AbstractGradSampleModule):
    """Opacus's grad-sample module, which permutes the network's units after every update.

    These are hidden units, heads and the residual stream. What the engine returns with
    ``shuffle_weights`` is one; to make one by hand, call this class as Opacus's
    ``GradSampleModule``.

    Args:
        m: The network.
        optimizer: The optimizer that trains it, plain or Opacus's. Without it, the wrapper attaches
            itself to the first one that steps on the network, before its first update, or to the
            one that :meth:`attach` names.
        groups: A :class:`PermutationSpec`, or the level at which :func:`find_permutations` is to
            look for one.
        sample_input: What the network is traced on, as for :func:`find_permutations`.
        generator: To repeat a run; never on real data.
        grad_sample_mode: One of Opacus's.
        **keywords: Opacus's own, such as ``batch_first``, ``loss_reduction`` and ``strict``.

    Attributes:
        shuffler: Does the work.

    Raises:
        ValueError: As :func:`find_permutations` and :class:`WeightShuffler`.
    """

    shuffler: WeightShuffler

    def __new__(
        cls,
        m: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        groups: str | PermutationSpec = "residual",
        sample_input: Any = None,
        generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **keywords: Any,
    ) -> Any:
        """Returns Opacus's wrapper of that mode, made a shuffling one."""
        from opacus.grad_sample import wrap_model

        from opacus_shuffle.permutation.find import find_permutations

        if isinstance(groups, PermutationSpec):
            groups.check(m, sample_input)
            spec = groups
        else:
            spec = find_permutations(m, sample_input, groups=groups)
        wrapped = wrap_model(m, grad_sample_mode=grad_sample_mode, **keywords)
        try:
            make_shuffled(wrapped, WeightShuffler(m, spec, optimizer, generator=generator))
        except BaseException:
            wrapped.cleanup()
            raise
        return wrapped

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows this optimizer from now on, see :meth:`WeightShuffler.attach`."""
        self.shuffler.attach(optimizer)

    @property
    def permutations(self) -> PermutationSpec:
        """The permutations that are drawn from."""
        return self.shuffler.spec

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of Opacus's wrapper, or else of the network."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        return getattr(unwrap(self), name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields parameters; an ``AveragedModel`` that reads them is followed from then on."""
        caller = sys._getframe(1)
        if caller.f_code is AveragedModel.update_parameters.__code__:
            self.shuffler.follow_reader(caller.f_locals["self"])
        return super().parameters(recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles as Opacus's plain wrapper, without the shuffler."""
        state = leaving({**self.__dict__, "shuffler": None})
        del state["shuffler"]
        return object.__new__, (type(self).__bases__[0],), state


@functools.cache
def _shuffling_class(opacus_class: Any) -> Any:
    """Returns a class derived from one of Opacus's wrappers, with shuffling."""

    class Shuffling(opacus_class, ShuffleGradSampleModule):  # type: ignore[misc]
        def __init__(self, *_: Any, **keywords: Any) -> None:
            """Does nothing: ``ShuffleGradSampleModule`` has built it already."""

    Shuffling.__name__ = f"Shuffle{opacus_class.__name__}"
    return Shuffling


def make_shuffled(wrapped: Any, shuffler: WeightShuffler) -> None:
    """Turns Opacus's wrapper into a shuffling one."""
    opacus_class: Any = type(wrapped)
    wrapped.__class__ = _shuffling_class(opacus_class)
    wrapped.shuffler = shuffler


def make_plain(wrapped: Any) -> WeightShuffler | None:
    """Turns a shuffling wrapper back into Opacus's, and returns its shuffler."""
    if not isinstance(wrapped, ShuffleGradSampleModule):
        return None
    shuffler = wrapped.shuffler
    del wrapped.shuffler
    wrapped.__class__ = type(wrapped).__bases__[0]
    return shuffler


def start_shuffling(
    network: nn.Module,
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    spec: PermutationSpec | None,
    *,
    generator: torch.Generator | None,
) -> WeightShuffler | None:
    """Starts shuffling the weights of a network, and ends an earlier shuffler.

    Without a specification, none are shuffled any more.
    """
    if spec is None:
        for owner in (unwrap(network), innermost(optimizer)):
            if (earlier := attached_shuffler(owner)) is not None:
                earlier.detach()
        return None
    warn_of_another_order(unwrap(network))
    shuffler = WeightShuffler(network, spec, optimizer, generator=generator)
    if isinstance(wrapped, nn.Module):
        make_shuffled(wrapped, shuffler)
    return shuffler
