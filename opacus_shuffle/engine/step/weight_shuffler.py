"""Permutes a network's weights and optimizer state after each update.

``WeightShuffler`` does the work. ``ShuffleGradSampleModule`` is Opacus's wrapper of a network with
a shuffler.

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
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from opacus_shuffle.core.opacus_compat import waits_for_step
from opacus_shuffle.core.randomness import SecretGenerator, check_generator
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.engine.batches.ranks import Ranks
from opacus_shuffle.engine.guards.raw_gradients import copied_attributes
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec

_ATTACHED: weakref.WeakKeyDictionary[Any, weakref.ref[WeightShuffler]] = weakref.WeakKeyDictionary()
"""The shuffler of each network and of each optimizer. Two of them would move the state twice."""

_WAITING: weakref.WeakSet[WeightShuffler] = weakref.WeakSet()
"""Shufflers without an optimizer. They attach themselves to the first one that steps."""


class WeightShuffler:
    """Moves weights, gradients and optimizer state by a fresh permutation after every update.

    This is Algorithm 1 of Yang, Ji and Xiang's weight shuffling. An average of the weights that
    ``torch.optim.swa_utils.AveragedModel`` updates from the private model follows automatically.
    Other averages follow after a call of :meth:`follow`.

    Args:
        module: The network, or a wrapper of it. All ranks of a distributed network draw the same
            permutations, from the secret of rank 0.
        spec: The permutations to draw from, found for this network.
        optimizer: The optimizer to follow, see :meth:`attach`. By default the first one that steps
            on the network.
        generator: A generator on the CPU. By default a secret stream, whose keys reveal nothing
            that was drawn before. Pass a generator to repeat a run, and never on real data.

    Attributes:
        spec: The permutations that are drawn from.
        shuffles: Number of permutations drawn.

    Raises:
        ValueError: If the network or the optimizer does not fit. Nothing has changed then.

    Formal Guarantees:
        The released weights are those of a run without shuffling, W_1, W_2, …, each moved by a
        uniform permutation that is independent of the others (Theorem 4.3 of
        docs/proofs/04_joint_distribution_of_releases.md). So the accountant of the unshuffled run
        is valid, and no smaller ε is valid for every data set. Two releases that are one small step
        apart can be matched, which reveals the permutation between them.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: PermutationSpec,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        self.spec = instance_of("spec", spec, (PermutationSpec,))
        check_generator("generator", generator)
        self.shuffles = 0
        self._network = unwrap(module)
        self._generator, self._stream = generator, SecretGenerator()
        self._averages: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        if not spec.tensors(self._network):
            raise ValueError("spec moves nothing: an empty PermutationSpec shuffles no weights")
        if (ranks := Ranks.of(module)).distributed:
            self.load_state_dict(ranks.of_the_first(self.state_dict()))
        if optimizer is not None:
            self._check(optimizer)  # may raise, so it comes before anything changes
        if (earlier := detach_shuffler(self._network)) is not None:
            self._averages = earlier._averages
        _ATTACHED[self._network] = weakref.ref(self)
        if optimizer is not None:
            self.attach(optimizer)
        else:
            _WAITING.add(self)
            _register_hook_of_first_steps()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a WeightShuffler cannot be copied or pickled, because it moves the weights of one "
            "network: keep its state_dict(), or call engine.save_checkpoint(...)"
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows an optimizer: its weights and its state are permuted after each of its steps.

        Args:
            optimizer: The only optimizer that trains the network, because the state of a second one
                would not follow. Of Opacus's optimizers the wrapped one is followed. It replaces
                the optimizer that was followed before.

        Raises:
            ValueError: If it trains no parameter that moves, or keeps state that cannot follow.
        """
        optimizer = self._check(optimizer)
        detach_shuffler(optimizer)
        self.detach()
        _ATTACHED.update({self._network: weakref.ref(self), optimizer: weakref.ref(self)})
        update = optimizer.register_step_post_hook(self._shuffle)
        # Earlier hooks of the user run after the shuffle, so they see the weights that are
        # released.
        update.hooks_dict_ref().move_to_end(update.id, last=False)  # type: ignore[union-attr, attr-defined]
        self._optimizer, self._handles = optimizer, [update]

    def detach(self) -> None:
        """Stops shuffling. The weights stay as they are."""
        _WAITING.discard(self)
        for handle in self._handles:
            handle.remove()
        for owner in [owner for owner, shuffler in _ATTACHED.items() if shuffler() is self]:
            del _ATTACHED[owner]
        self._handles = []

    def follow(self, average: nn.Module) -> None:
        """Permutes an average of the network's weights together with them from now on.

        Args:
            average: A copy of the network, or a wrapper of a copy, that is updated from the
                network's ``parameters()``. Its weights are overwritten with those of the network.

        Raises:
            ValueError: If it is no copy.
        """
        copied = unwrap(instance_of("average", average, (nn.Module,)))
        source, target = (net.state_dict(keep_vars=True) for net in (self._network, copied))
        shapes = [{name: tensor.shape for name, tensor in s.items()} for s in (source, target)]
        if copied is self._network or shapes[0] != shapes[1]:
            raise ValueError(
                f"average must be a copy of the network, got {type(average).__name__}: pass "
                "copy.deepcopy(model)"
            )
        with torch.no_grad():
            for name, tensor in source.items():
                target[name].copy_(tensor)
        self._averages.add(copied)

    def follow_reader(self, average: AveragedModel) -> None:
        """Follows an average that is about to read the network's parameters.

        Raises:
            ValueError: If it has averaged weights before, which were in another order.
        """
        if not self._handles or unwrap(average) in self._averages:
            return
        if average.n_averaged:
            raise ValueError(
                f"{type(average).__name__} has averaged weights whose units are in another order "
                "than the network's: build it from the model that make_private returned, and load "
                "its state afterwards"
            )
        self.follow(average)

    def shuffle_(self) -> None:
        """Draws a permutation and applies it now.

        Raises:
            ValueError: In the middle of a batch, whose gradients would not be moved.
        """
        if any(map(waits_for_step, self._network.parameters())):
            raise ValueError(
                "shuffle_() in the middle of a batch would not move its gradients: step first"
            )
        self._shuffle()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs to draw the same permutations.

        The state is a secret, because it determines all permutations that are drawn later. It does
        not reveal earlier ones, unless the shuffler has a ``generator``, whose state can be run
        backwards.
        """
        return {
            "key": self._stream.key,
            "generator": None if self._generator is None else self._generator.get_state(),
            "shuffles": self.shuffles,
        }

    def load_state_dict(self, state: Any) -> None:
        """Continues from the state of an earlier run.

        Raises:
            ValueError: If it is no state of a shuffler, is damaged, or belongs to a shuffler with
                another source of randomness. Nothing has changed then.
        """
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise ValueError(
                f"state must come from WeightShuffler.state_dict(), got {type(state).__name__}"
            )
        shuffles = integer("shuffles in state", state["shuffles"], minimum=0)
        if (state["generator"] is None) != (self._generator is None):
            raise ValueError(
                "state was saved with a generator and loaded without one, or the reverse: pass the "
                "same generator"
            )
        key, size = state["key"], len(self._stream.key)
        if not isinstance(key, bytes) or len(key) != size:  # the message must not show the key
            raise ValueError(
                f"key in state must be {size} bytes, got something else: the state is damaged"
            )
        if self._generator is not None:
            try:
                self._generator.set_state(state["generator"])
            except (TypeError, RuntimeError) as error:
                raise ValueError(
                    f"generator in state must be a generator's state ({error}): it is damaged"
                ) from None
        self._stream, self.shuffles = SecretGenerator(key=key, secret=True), shuffles

    def draw(self) -> PermutationPlan:
        """Draws a permutation from the whole group, and replaces the key of the secret stream.

        So a key in a checkpoint reveals later permutations, and no earlier ones.
        """
        plan = self.spec.sample(self._stream if self._generator is None else self._generator)
        self._stream.next_key()
        return plan

    def _check(self, optimizer: Any) -> torch.optim.Optimizer:
        """Returns the innermost optimizer. Refuses one that cannot be followed."""
        inner = innermost(optimizer)
        check_optimizer(inner)
        tensors = self.spec.tensors(self._network)
        if not _trains_any(inner, tensors.values()):
            raise ValueError(
                f"optimizer {type(inner).__name__} trains none of the parameters that would move"
            )
        self.spec.followers(tensors, inner)
        return inner

    def _shuffle(self, *_: Any) -> None:
        # Buffers and gradients may be other tensors than at the last step.
        moving = self.spec.followers(self.spec.tensors(self._network), self._optimizer)
        for average in self._averages:
            for name, tensor in self.spec.tensors(average).items():
                moving[name].append(tensor)
        self.shuffles += 1
        self.spec.move(moving, self.draw())


def detach_shuffler(owner: nn.Module | torch.optim.Optimizer) -> WeightShuffler | None:
    """Detaches the shuffler of a network or an optimizer, and returns it; None if there is none."""
    reference = _ATTACHED.get(owner)
    shuffler = None if reference is None else reference()
    if shuffler is not None:
        shuffler.detach()
    return shuffler


@functools.cache
def _register_hook_of_first_steps() -> None:
    """Registers a hook of all optimizers' steps, once, for shufflers without an optimizer."""
    # Inside of a compiled step, the graph would keep the answer of the first call.
    register_optimizer_step_pre_hook(torch.compiler.disable(_attach_waiting))  # type: ignore[no-untyped-call]


def _attach_waiting(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for shuffler in list(_WAITING):
        if _trains_any(optimizer, shuffler._network.parameters()):
            shuffler.attach(optimizer)


def _trains_any(optimizer: torch.optim.Optimizer, tensors: Any) -> bool:
    """Returns whether an optimizer trains at least one of these tensors."""
    trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return not trained.isdisjoint(map(id, tensors))


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that Opacus's optimizers wrap."""
    while hasattr(optimizer, "original_optimizer"):
        optimizer = optimizer.original_optimizer
    return instance_of("optimizer", optimizer, (torch.optim.Optimizer,))  # type: ignore[no-any-return]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses PyTorch's optimizers whose state cannot follow a permutation of the weights.

    Others are refused at their first step if their state has another shape than the weights.
    """
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor | torch.optim.SparseAdam):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} keeps factored, flat or sparse state, which "
            "cannot follow a permutation of the weights: use SGD, Adam, AdamW or RMSprop"
        )


class ShuffleGradSampleModule(AbstractGradSampleModule):
    """Opacus's grad-sample module, which permutes the network's units after every update.

    The units are hidden units, attention heads and entries of the residual stream. The engine
    returns this class with ``shuffle_weights``. Without an engine, use it as Opacus's
    ``GradSampleModule``.

    Args:
        m: The network.
        optimizer: The optimizer that trains it, plain or Opacus's. Without it, the wrapper attaches
            itself to the first one that steps on the network, before its first update, or to the
            one that is passed to :meth:`attach`.
        groups: A :class:`PermutationSpec`, or the level at which :func:`find_permutations` searches
            for one.
        sample_input: The input on which the network is traced, as for :func:`find_permutations`.
        generator: A generator to repeat a run. Do not use one on real data.
        grad_sample_mode: One of Opacus's modes.
        **keywords: Opacus's arguments, such as ``batch_first``, ``loss_reduction`` and ``strict``.

    Attributes:
        shuffler: The :class:`WeightShuffler` of the network.

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
        """Returns Opacus's wrapper of that mode, with a shuffler."""
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
        """Returns an attribute of Opacus's wrapper, or else of the network."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        return getattr(unwrap(self), name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters. An ``AveragedModel`` that reads them follows from then on."""
        caller = sys._getframe(1)
        if caller.f_code is AveragedModel.update_parameters.__code__:
            self.shuffler.follow_reader(caller.f_locals["self"])
        return super().parameters(recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles as Opacus's plain wrapper, without the shuffler."""
        attributes = {name: value for name, value in vars(self).items() if name != "shuffler"}
        return object.__new__, (type(self).__bases__[0],), copied_attributes(attributes)


@functools.cache
def _shuffling_class(opacus_class: Any) -> Any:
    """Returns a class derived from one of Opacus's wrappers, with shuffling."""
    # ``ShuffleGradSampleModule.__new__`` returns a wrapper that is built already, so that the call
    # of ``__init__`` which follows it must do nothing.
    return type(
        f"Shuffle{opacus_class.__name__}",
        (opacus_class, ShuffleGradSampleModule),
        {"__init__": lambda self, *args, **keywords: None},
    )


def make_shuffled(wrapped: Any, shuffler: WeightShuffler) -> None:
    """Turns Opacus's wrapper into a shuffling one."""
    wrapped.__class__ = _shuffling_class(wrapped.__class__)
    wrapped.shuffler = shuffler


def make_plain(wrapped: Any) -> WeightShuffler | None:
    """Turns a shuffling wrapper back into Opacus's, and returns its shuffler."""
    if not isinstance(wrapped, ShuffleGradSampleModule):
        return None
    shuffler: WeightShuffler = wrapped.__dict__.pop("shuffler")
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

    Without a specification, no weights are shuffled any more.
    """
    if spec is None:
        detach_shuffler(unwrap(network))
        detach_shuffler(innermost(optimizer))
        return None
    shuffler = WeightShuffler(network, spec, optimizer, generator=generator)
    if isinstance(wrapped, nn.Module):
        make_shuffled(wrapped, shuffler)
    return shuffler
