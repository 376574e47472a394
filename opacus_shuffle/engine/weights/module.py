"""Opacus's wrapper of a network, made one whose weights are shuffled: ``ShuffleGradSampleModule``.

>>> import torch
>>> from opacus.optimizers import DPOptimizer
>>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
>>> private = ShuffleGradSampleModule(network, optimizer=sgd)
>>> optimizer = DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=5)
>>> private(torch.randn(5, 4)).square().sum().backward()
>>> optimizer.step()
>>> private.shuffler.shuffles
1
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opacus_shuffle.engine.ranks import is_distributed
from opacus_shuffle.engine.raw_data import leaving
from opacus_shuffle.engine.weights.attached import detach_shuffler, warn_of_another_order
from opacus_shuffle.engine.weights.averages import average_that_reads
from opacus_shuffle.engine.weights.optimizers import innermost
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation.discover import find_permutations
from opacus_shuffle.permutation.spec import PermutationSpec


class ShuffleGradSampleModule:
    """A grad-sample module of any mode that permutes hidden units, heads and the residual stream after every update.

    What the engine returns with ``shuffle_weights`` is one; to make one by hand, call this class as Opacus's
    ``GradSampleModule``, with an optimizer.

    Args:
        module: The network.
        optimizer: The plain optimizer that trains it.
        groups: A :class:`PermutationSpec`, or the level at which :func:`find_permutations` is to look for one.
        sample_input: What the network is traced on.
        mode: When to permute, as of :class:`WeightShuffler`: ``"every_step"`` or ``"on_release"``.
        generator: To repeat a run; never on real data.
        grad_sample_mode: One of Opacus's.
        **keywords: Opacus's own, such as ``batch_first`` and ``loss_reduction``.

    Attributes:
        shuffler: Does the work.

    Raises:
        ValueError: As :func:`find_permutations` and :class:`WeightShuffler`.
    """

    shuffler: WeightShuffler

    def __new__(
        cls,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        groups: str | PermutationSpec = "residual",
        sample_input: Any = None,
        mode: str = "every_step",
        generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **keywords: Any,
    ) -> Any:
        """Returns Opacus's wrapper of that mode, made a shuffling one."""
        from opacus.grad_sample import wrap_model

        if isinstance(groups, PermutationSpec):
            groups.check(module, sample_input)
            spec = groups
        else:
            spec = find_permutations(module, sample_input, groups=groups)
        wrapped = wrap_model(module, grad_sample_mode=grad_sample_mode, **keywords)
        try:
            make_shuffled(wrapped, WeightShuffler(module, spec, optimizer, mode=mode, generator=generator))
        except BaseException:
            wrapped.cleanup()
            raise
        return wrapped

    @property
    def permutations(self) -> PermutationSpec:
        """What may be permuted."""
        return self.shuffler.spec

    def release(self) -> None:
        """Permutes the weights in memory if they were not since their last update, for ways out that nobody sees."""
        self.shuffler.release()

    def __getattr__(self, name: str) -> Any:
        """Returns what Opacus's wrapper has, or else what the network offers, such as ``generate`` and ``save_pretrained``."""
        try:
            return _plain_class(type(self)).__getattr__(self, name)
        except AttributeError:
            if name.startswith("_"):
                raise
        return getattr(unwrap(self), name)  # type: ignore[arg-type]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As PyTorch's; an ``AveragedModel`` that reads them for the first time follows from now on, wherever it was made."""
        if (average := average_that_reads()) is not None:
            self.shuffler.follow_reader(average)
        return _plain_class(type(self)).parameters(self, recurse)  # type: ignore[no-any-return]

    def to_standard_module(self) -> nn.Module:
        """Returns the network itself, its weights permuted."""
        self.release()
        return _plain_class(type(self)).to_standard_module(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy of Opacus's class: it has nothing to do with the run."""
        copied = object.__new__(_plain_class(type(self)))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy({k: v for k, v in leaving(self.__dict__).items() if k != "shuffler"}, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Has it pickled as Opacus's class; the shuffler's hooks refuse where that would show what was not released."""
        return object.__new__, (_plain_class(type(self)),), {k: v for k, v in leaving(self.__dict__).items() if k != "shuffler"}


@functools.cache
def shuffled_class(base: Any) -> Any:
    """Returns the class of Opacus's wrappers of one mode, with shuffling."""
    # Opacus's class comes first, or an instance of it could not become one of ours; so our methods are put before it by hand.
    own: dict[str, Any] = {
        name: ShuffleGradSampleModule.__dict__[name]
        for name in ("__new__", "__getattr__", "parameters", "to_standard_module", "__deepcopy__", "__reduce_ex__")
    }
    own["__init__"] = lambda self, *args, **keywords: None  # __new__ has done it all
    return type(f"Shuffle{base.__name__}", (base, ShuffleGradSampleModule), {"__module__": __name__, **own})


def make_shuffled(wrapped: Any, shuffler: WeightShuffler) -> None:
    """Turns Opacus's wrapper into a shuffling one, as ``torch.nn.utils.parametrize`` turns modules."""
    kind: Any = type(wrapped)
    wrapped.__class__ = shuffled_class(kind)
    wrapped.shuffler = shuffler


def make_plain(wrapped: Any) -> None:
    """Undoes :func:`make_shuffled`."""
    if isinstance(wrapped, ShuffleGradSampleModule):
        wrapped.__class__ = _plain_class(type(wrapped))
        wrapped.__dict__.pop("shuffler", None)


def _plain_class(kind: type) -> Any:
    return kind.__bases__[0]


def start_shuffling(
    network: nn.Module,
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    spec: PermutationSpec | None,
    *,
    mode: str,
    generator: torch.Generator | None,
) -> WeightShuffler | None:
    """Shuffles the weights of a network, or without a specification none, in the place of what an earlier call has started."""
    if spec is None:
        for each in (unwrap(network), innermost(optimizer)):
            detach_shuffler(each)
        return None
    warn_of_another_order(unwrap(network))
    shuffler = WeightShuffler(network, spec, optimizer, mode=mode, generator=generator, synchronise=is_distributed(network))
    if isinstance(wrapped, nn.Module):
        make_shuffled(wrapped, shuffler)
    return shuffler
