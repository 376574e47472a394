"""``WeightShuffler``: permutes a network's weights and optimizer state after each update.

>>> network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
>>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
>>> from opacus_shuffle.permutation import find_permutations
>>> shuffler = WeightShuffler(network, find_permutations(network), optimizer)
>>> network(torch.ones(3, 4)).sum().backward()
>>> optimizer.step()
>>> shuffler.shuffles
1
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from opacus_shuffle.core.opacus_compat import waits_for_step
from opacus_shuffle.core.randomness import SecretGenerator, check_generator
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.engine.ranks import Ranks
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec

_ATTACHED: weakref.WeakKeyDictionary[Any, weakref.ref[WeightShuffler]] = weakref.WeakKeyDictionary()
"""The shuffler of each network and of each optimizer: two of them would move the state twice."""

_WAITING: weakref.WeakSet[WeightShuffler] = weakref.WeakSet()
"""Shufflers whose optimizer nobody has named: it is the one that steps first."""

_MOVED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Networks whose units lie in an order that some shuffler has drawn."""


class WeightShuffler:
    """Moves weights, gradients and optimizer state by a fresh permutation after every update.

    That is Yang, Ji and Xiang's weight shuffling (Algorithm 1). An average of the weights that
    ``torch.optim.swa_utils.AveragedModel`` updates from the private model follows by itself; others
    from a call of :meth:`follow` on.

    Args:
        module: The network or a wrapper of it. Of a distributed one, all ranks draw the same
            permutations, by rank 0's secret.
        spec: The group to draw from, of this network.
        optimizer: As of :meth:`attach`; by default the first one that steps on the network.
        generator: On the CPU; by default a secret stream, whose earlier keys cannot be told from
            later ones. Pass your own to repeat a run, and never on real data.

    Attributes:
        spec: What is drawn from.
        steps: Updates seen.
        shuffles: Permutations drawn.

    Raises:
        ValueError: If the network or the optimizer does not fit; nothing has changed then.

    Formal Guarantees:
        What is released is W_1, W_2, … of a run without shuffling, each moved by a uniform
        permutation that is independent of the others (Theorem 4.3 of
        docs/proofs/04_joint_distribution_of_releases.md). So the unshuffled accountant is valid,
        and nothing smaller is valid for every data set. Two releases a small step apart can be
        matched, which shows the permutation between them.
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
        self.steps = self.shuffles = 0
        self._network = unwrap(module)
        self._known = {name for name, _ in self._network.named_parameters(remove_duplicate=False)}
        self._generator, self._stream = generator, SecretGenerator()
        self._averages: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        if not spec.tensors(self._network):
            raise ValueError("spec moves nothing: an empty PermutationSpec shuffles no weights")
        if optimizer is not None:
            self._check(optimizer)
        if (ranks := Ranks.of(module)).distributed:
            self.load_state_dict(ranks.of_the_first(self.state_dict()))
        if (earlier := attached_shuffler(self._network)) is not None:
            earlier.detach()
            self._averages = earlier._averages
        _ATTACHED[self._network] = weakref.ref(self)
        if optimizer is not None:
            self.attach(optimizer)
        else:
            _WAITING.add(self)
            _look_at_first_steps()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a WeightShuffler cannot be copied or pickled: it moves the weights of its own network "
            "alone; keep its state_dict(), or engine.save_checkpoint(...)"
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows an optimizer: weights and its state are permuted after each of its steps.

        Args:
            optimizer: Trains all of the network that is trained (the state of a second one would
                not follow). Of Opacus's optimizers it is the one inside. It takes the place of the
                one that was followed so far.

        Raises:
            ValueError: If it trains nothing that moves, or keeps state that cannot follow.
        """
        optimizer = self._check(optimizer)
        for earlier in (attached_shuffler(optimizer), self):
            if earlier is not None:
                earlier.detach()
        _ATTACHED.update({self._network: weakref.ref(self), optimizer: weakref.ref(self)})
        update = optimizer.register_step_post_hook(self._after_update)
        # Hooks that were there before ours see the weights that this update releases.
        update.hooks_dict_ref().move_to_end(update.id, last=False)  # type: ignore[union-attr, attr-defined]
        self._optimizer, self._handles = optimizer, [update]

    def detach(self) -> None:
        """Stops shuffling; the weights stay as they are."""
        _WAITING.discard(self)
        for handle in self._handles:
            handle.remove()
        for owner in [owner for owner, shuffler in _ATTACHED.items() if shuffler() is self]:
            del _ATTACHED[owner]
        self._handles = []

    def follow(self, average: nn.Module) -> None:
        """Has an average of the network's weights permuted with them from now on.

        Args:
            average: A copy of the network, or a wrapper of one, that is updated from the network's
                ``parameters()``; its weights are overwritten.

        Raises:
            ValueError: If it is no copy.
        """
        copied = unwrap(instance_of("average", average, (nn.Module,)))
        own, others = self._network.state_dict(keep_vars=True), copied.state_dict(keep_vars=True)
        shapes = [{name: tensor.shape for name, tensor in state.items()} for state in (own, others)]
        if copied is self._network or shapes[0] != shapes[1]:
            raise ValueError(
                f"average must be a copy of the network, got {type(average).__name__}: pass "
                "copy.deepcopy(model)"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                others[name].copy_(tensor)
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
                "than the network's: make it of what make_private returned, and load its state "
                "afterwards"
            )
        self.follow(average)

    def shuffle_(self) -> None:
        """Draws a permutation and applies it now.

        Raises:
            ValueError: In the middle of a batch, whose gradients would stay behind.
        """
        if any(map(waits_for_step, self._network.parameters())):
            raise ValueError(
                "shuffle_() in the middle of a batch would leave its gradients behind: step first"
            )
        self._shuffle()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to draw the same permutations.

        It is a secret, since it tells all that are to come. By default it tells none that were
        drawn; the state of a generator of your own can be run backwards to them.
        """
        generator = None if self._generator is None else self._generator.get_state()
        counts = {"steps": self.steps, "shuffles": self.shuffles}
        return {"key": self._stream.key, "generator": generator, **counts}

    def load_state_dict(self, state: Any) -> None:
        """Continues from the state of an earlier run.

        Raises:
            ValueError: If it is no state of a shuffler, damaged, or of another kind of secret;
                nothing has changed then.
        """
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise ValueError(
                f"state must come from WeightShuffler.state_dict(), got {type(state).__name__}"
            )
        steps, shuffles = (
            integer(f"{name} in state", state[name], minimum=0) for name in ("steps", "shuffles")
        )
        if (state["generator"] is None) != (self._generator is None):
            raise ValueError(
                "state was saved with a generator of your own and loaded without, or the reverse: "
                "use the same"
            )
        key, size = state["key"], len(self._stream.key)
        if not isinstance(key, bytes) or len(key) != size:  # which no message shows
            raise ValueError(
                f"key in state must be {size} bytes, got something else: the state was damaged"
            )
        if self._generator is not None:
            try:
                self._generator.set_state(state["generator"])
            except (TypeError, RuntimeError) as error:
                raise ValueError(
                    f"generator in state must be a generator's state ({error}): it was damaged"
                ) from None
        self._stream = SecretGenerator(key=key, secret=True)
        self.steps, self.shuffles = steps, shuffles

    def _check(self, optimizer: Any) -> torch.optim.Optimizer:
        """Returns the innermost optimizer; refuses one that cannot be followed."""
        inner = innermost(optimizer)
        check_optimizer(inner)
        tensors = self._tensors()
        trained = set(map(id, _parameters_of(inner)))
        if trained.isdisjoint(map(id, tensors.values())):
            raise ValueError(
                f"optimizer {type(inner).__name__} trains none of the parameters that would move"
            )
        self.spec.followers(tensors, inner)
        return inner

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that are permuted; refuses a network that has got new parameters."""
        parameters = self._network.named_parameters(remove_duplicate=False)
        if later := [name for name, _ in parameters if name not in self._known]:
            raise ValueError(
                "module has got new parameters since its permutations were found, "
                f"{', '.join(later)}, which may not fit the units that move: take them out, or "
                "call make_private again"
            )
        return self.spec.tensors(self._network)

    def _after_update(self, *_: Any) -> None:
        self.steps += 1
        self._shuffle()

    def _shuffle(self) -> None:
        # Buffers and gradients may be other tensors than at the last step.
        moving = self.spec.followers(self._tensors(), self._optimizer)
        for average in self._averages:
            for name, tensor in self.spec.tensors(average).items():
                moving[name].append(tensor)
        self.shuffles += 1
        _MOVED.add(self._network)
        self.spec.move(moving, self.draw())

    def draw(self) -> PermutationPlan:
        """Draws a permutation of the whole group, and replaces the key of the secret stream.

        So a key in a checkpoint tells the permutations from then on, and none before.
        """
        plan = self.spec.sample(self._stream if self._generator is None else self._generator)
        self._stream.next_key()
        return plan


@functools.cache
def _look_at_first_steps() -> None:
    """Registers a look at all optimizers' steps, for shufflers that wait for theirs."""
    # Compiled steps ask outside of their graph, or it would hold the answer of the first one.
    register_optimizer_step_pre_hook(torch.compiler.disable(_attach_waiting))  # type: ignore[no-untyped-call]


def _attach_waiting(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    trained = set(map(id, _parameters_of(optimizer)))
    for shuffler in list(_WAITING):
        if not trained.isdisjoint(map(id, shuffler._network.parameters())):
            shuffler.attach(optimizer)


def attached_shuffler(owner: nn.Module | torch.optim.Optimizer) -> WeightShuffler | None:
    """Returns the shuffler of a network or an optimizer, None if it has none."""
    reference = _ATTACHED.get(owner)
    return None if reference is None else reference()


def warn_of_another_order(network: nn.Module) -> None:
    """Warns if another shuffled run has permuted these weights before."""
    if network in _MOVED:
        warnings.warn(
            f"{type(network).__name__} has weights whose units another shuffled run has put in an "
            "order of its own: an average with weights of other runs, such as other clients', "
            "would mix different units, and nothing would show it; average only weights of runs "
            "without shuffle_weights (docs/weight_shuffling.rst)",
            stacklevel=2,
        )


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside of Opacus's."""
    while hasattr(optimizer, "original_optimizer"):
        optimizer = optimizer.original_optimizer
    return instance_of("optimizer", optimizer, (torch.optim.Optimizer,))  # type: ignore[no-any-return]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers whose state cannot follow a permutation of the weights.

    Raises:
        ValueError: If it is one of those that are known.
    """
    keeps = f"optimizer {type(optimizer).__name__} keeps"
    cannot_follow = "cannot follow a permutation of the weights: use SGD, Adam, AdamW or RMSprop"
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor | torch.optim.SparseAdam):
        raise ValueError(f"{keeps} factored, flat or sparse state, which {cannot_follow}")
    own = set(map(id, _parameters_of(optimizer)))
    for name in vars(optimizer).keys() - {"state", "param_groups", "defaults"}:
        for leaf in tree_leaves(vars(optimizer)[name]):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and id(leaf) not in own:
                raise ValueError(
                    f"{keeps} tensors in its attribute {name!r}, outside of its state, where they "
                    f"{cannot_follow}"
                )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
