"""Permutes a network's weights and optimizer state after each update.

``WeightShuffling`` has the settings, :func:`find_spec` finds which weights may move, and
``WeightShuffler`` moves them. ``ShuffleGradSampleModule`` is Opacus's wrapper of a network with a
shuffler.

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

import dataclasses
import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import check_attention, check_ghost_ties, waits_for_step
from opacus_shuffle.core.randomness import SecretGenerator, check_generator
from opacus_shuffle.core.validation import instance_of, integer, noise_level, one_of, positive
from opacus_shuffle.engine.batches.ranks import Ranks
from opacus_shuffle.engine.guards.raw_gradients import copied_attributes
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import first_records, from_batch, run_quietly
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import check_ready

LARGE_SHARE = 0.1
"""A warning gives the reasons if a larger share of the parameters stays although all may move."""

MOST_REASONS = 3
"""How many reasons the warning gives."""

_ATTACHED: weakref.WeakKeyDictionary[Any, weakref.ref[WeightShuffler]] = weakref.WeakKeyDictionary()
"""The shuffler of each network and of each optimizer. Two of them would move the state twice.

A shuffler without an optimizer attaches itself to the first one that steps on its network.
"""


@dataclasses.dataclass(frozen=True)
class WeightShuffling:
    """The settings of ``make_private(shuffle_weights=...)``. True means ``WeightShuffling()``.

    The last two fields are those of Yang, Ji and Xiang's weight shuffling (WS), Algorithm 1. They
    go with ``shuffled_fw`` only.

    Attributes:
        groups: What moves. True, the same as ``"residual"``, for every permutation that
            :func:`find_permutations` finds on the first records; ``"heads"`` or ``"paper"`` for
            fewer; or a ``PermutationSpec``, such as one found on a sample of your own. False moves
            nothing; with ``shuffled_fw`` it asks for plain DP-SGD.
        generator: A generator on the CPU. By default a secret one, from the operating system.
        batch_clip: c′, the norm to which the **sum** of the shuffled parameters' gradients is
            clipped before the noise is added (line 12), in the units of ``max_grad_norm``. The
            default is ``max_grad_norm``, which scales a batch's sum down to the size of one
            record's gradient. ``math.inf`` clips nothing, and then WS Theorem 6 gains nothing.
        unshuffled_noise_multiplier: σ₀ ≥ σ, for parameters that are not shuffled (line 16). The
            default is σ.

    Raises:
        ValueError: If a field is out of range.
    """

    groups: bool | str | PermutationSpec = True
    generator: torch.Generator | None = None
    batch_clip: float | None = None
    unshuffled_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        instance_of("shuffle_weights (groups)", self.groups, (bool, str, PermutationSpec))
        if isinstance(self.groups, str):
            from opacus_shuffle.permutation.finding.nesting import LEVELS

            one_of("shuffle_weights (groups)", self.groups, (True, False, *LEVELS))
        check_generator("generator (of WeightShuffling)", self.generator)
        if self.batch_clip is not None:
            positive("batch_clip", self.batch_clip, infinite=True)
        if self.unshuffled_noise_multiplier is not None:
            noise_level("unshuffled_noise_multiplier", self.unshuffled_noise_multiplier)
        if self.groups is False:
            self.check_absent(
                [field.name for field in dataclasses.fields(self)[1:]],
                "applies to shuffled parameters: pass shuffle_weights=True (or groups) too, or "
                "leave it out",
            )

    @classmethod
    def of(cls, shuffle_weights: Any) -> WeightShuffling:
        """Returns the settings that the argument ``shuffle_weights`` of ``make_private`` gives."""
        return shuffle_weights if isinstance(shuffle_weights, cls) else cls(groups=shuffle_weights)

    def check_absent(self, names: Sequence[str], why: str) -> None:
        """Refuses fields that were given and have no meaning here.

        Raises:
            ValueError: If one of them is not the default, with the reason.
        """
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if field.name in names and (value := getattr(self, field.name)) != field.default
        ]
        if given:
            raise ValueError(f"{', '.join(given)} {why}")


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
        """Follows an optimizer: permutes its weights and its state after each of its steps.

        Args:
            optimizer: The only optimizer that trains the network, because the state of a second one
                would not follow. If it is one of Opacus's, the optimizer that it wraps is followed.
                It replaces the optimizer that was followed before.

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
            ValueError: If it is not a copy, or is an ``AveragedModel`` whose averages have their
                units in another order.
        """
        copied = unwrap(instance_of("average", average, (nn.Module,)))
        source, target = (net.state_dict(keep_vars=True) for net in (self._network, copied))
        shapes = [{name: tensor.shape for name, tensor in s.items()} for s in (source, target)]
        if copied is self._network or shapes[0] != shapes[1]:
            raise ValueError(
                f"average must be a copy of the network, got {type(average).__name__}: pass "
                "copy.deepcopy(model)"
            )
        if isinstance(average, AveragedModel) and average.n_averaged:
            raise ValueError(
                f"{type(average).__name__} has averaged weights whose units are in another order "
                "than the network's: build it from the model that make_private returned, and load "
                "its state afterwards"
            )
        with torch.no_grad():
            for name, tensor in source.items():
                target[name].copy_(tensor)
        self._averages.add(copied)

    def shuffle_(self) -> None:
        """Draws a permutation and applies it now.

        Raises:
            ValueError: If a batch is unfinished. Its gradients would not be moved.
        """
        if any(map(waits_for_step, self._network.parameters())):
            raise ValueError(
                "shuffle_() in the middle of a batch would not move its gradients: step first"
            )
        self._shuffle()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs to draw the same permutations.

        Keep the state secret, because it determines all permutations that are drawn later. It does
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
            ValueError: If it is not a shuffler's state, is damaged, or belongs to a shuffler with
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
    for shuffler in [reference() for reference in _ATTACHED.values()]:
        if shuffler is None or shuffler._optimizer is not None:
            continue
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
        # Opacus's wrapper has nothing else that a Python class does not find by itself.
        return super().__getattr__(name) if name[0] == "_" else getattr(unwrap(self), name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters. An ``AveragedModel`` that reads them follows from then on."""
        caller, shuffler = sys._getframe(1), self.shuffler
        if caller.f_code is AveragedModel.update_parameters.__code__ and shuffler._handles:
            average = caller.f_locals["self"]
            if unwrap(average) not in shuffler._averages:
                shuffler.follow(average)
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


def find_spec(
    shuffling: WeightShuffling,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    grad_sample_mode: str = "hooks",
) -> PermutationSpec | None:
    """Finds which weights of a network will be shuffled; None for none.

    The arguments are those of ``make_private``. The network is traced on the loader's first
    records. No sampler and no random state changes.

    Warns:
        UserWarning: If everything that can move was asked for, and much stays, with the reasons.

    Raises:
        ValueError: If network, data or optimizer do not go with shuffling.
    """
    if shuffling.groups is False:
        return None
    # Imported here because it takes time, and only runs with shuffled weights need it.
    from opacus_shuffle.permutation.find import find_on_calls

    network, inner = unwrap(module), innermost(optimizer)
    check_optimizer(inner)
    check_attention(network)
    if grad_sample_mode == "ghost":
        check_ghost_ties(network)
    check_ready(network)
    call = from_batch(network, first_records(data_loader))
    try:
        run_quietly(network, *call)
    except Exception as error:
        raise ValueError(
            f"data_loader's first records do not run through {type(network).__name__}: "
            f"{type(error).__name__}: {error}; pass shuffle_weights=find_permutations(module, "
            "sample_input) if the network is called with something else than the batches"
        ) from error
    groups = "residual" if shuffling.groups is True else shuffling.groups
    if isinstance(groups, PermutationSpec):
        spec = groups
        check_calls(spec, network, [call])
    else:
        spec = find_on_calls(network, [call], str(groups))
        if groups == "residual":
            warn_of_unmoved(spec, network)
    if (ranks := Ranks.of(module)).distributed:
        spec = ranks.of_the_first(spec)  # another rank's first records may have another length
        check_calls(spec, network, [call])
    spec.followers(spec.tensors(network), inner)  # raises for state that cannot follow
    return spec


def warn_of_unmoved(spec: PermutationSpec, network: nn.Module) -> None:
    """Warns if a large share of a network stays in place, and gives the reasons.

    Args:
        spec: The permutations that were found, with the causes why axes stay.
        network: The network itself.
    """
    share = spec.shuffle_ratio(network)
    if share >= 1 - LARGE_SHARE:
        return
    entries = Counter[str]()
    for name, size in spec.unmoved.items():
        # A cause is written for each axis, "axis 0: ...", and several axes may have the same.
        for reason in {axis.partition(": ")[2] for axis in spec.causes[name].split("; ")}:
            entries[reason or "not reached"] += size
    reasons = [f"{reason} ({size:,} entries)" for reason, size in entries.most_common(MOST_REASONS)]
    warnings.warn(
        f"shuffle_weights moves {share:.1%} of the parameters of {type(network).__name__}; the "
        "others stay in place in all that is released. Most of them stay because of: "
        f"{'; '.join(reasons)}. {spec.describe_unreached()}Let the network return only what the "
        "loss needs (logits, no hidden states). Passing "
        "shuffle_weights=find_permutations(module, sample_input) ends this warning, and describe() "
        "of what it returns shows all reasons",
        stacklevel=2,
    )
