"""``WeightShuffler``: permutes a network's weights, and what belongs to them, while an optimizer trains it.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> optimizer = torch.optim.Adam(network.parameters())
>>> shuffler = WeightShuffler(network, find_permutations(network), optimizer)
>>> for _ in range(3):
...     network(torch.randn(5, 4)).sum().backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> shuffler.shuffles
3
"""

from __future__ import annotations

import copy
import sys
import weakref
from types import FrameType
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils._pytree import tree_leaves

from opacus_shuffle.core.opacus_compat import waits_for_step
from opacus_shuffle.core.randomness import KeyChain, check_generator
from opacus_shuffle.core.validation import instance_of, one_of
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec
from opacus_shuffle.permutation.network import unwrap

MODES = ("every_step", "on_release")
FLAT_STATE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam)
"""Optimizers of PyTorch whose state is factored or flat, or whose updates are sparse, so that it cannot follow."""

_ATTACHED: weakref.WeakKeyDictionary[Any, weakref.ref[WeightShuffler]] = weakref.WeakKeyDictionary()


class WeightShuffler:
    """Moves parameters, buffers, gradients and same-shape optimizer state by fresh uniform permutations.

    Args:
        module: The network or a wrapper of it.
        spec: The group to draw from, of this network.
        optimizer: Trains all of it that is trained (the state of a second optimizer would not follow); Opacus's optimizers are
            followed to the one inside. A shuffler that was there before is replaced.
        mode: ``"every_step"``: after every update (WS Algorithm 1). ``"on_release"``: what ``state_dict`` of the network and of
            the optimizer return is permuted, by one permutation until the next update, and the run itself goes on where it is;
            costs nothing per step. Other ways out, such as ``parameters()``, a copy of the network or a pickled optimizer, need
            a call of :meth:`release` before. What was shown is to be loaded again as a whole: weights and optimizer state.
            Averages of weights over steps (EMA, SWA) and anchors kept elsewhere do not follow ``"every_step"``; use this mode.
        generator: On the CPU; by default a chain of keys from the operating system, which cannot be run backwards. Pass your
            own to repeat a run, and never on real data.
        synchronise: All ranks of the default process group draw the same permutations, by rank 0's secret.
        executor: See :func:`opacus_shuffle.permutation.moving.gather.gather_`.
        storage: See there.

    Attributes:
        steps: Updates seen.
        shuffles: Permutations drawn.

    Raises:
        ValueError: If the network or the optimizer does not fit.

    Formal Guarantees:
        Let Q_t be the product of all permutations up to step t and W_t = Q_t⁻¹·(the weights). As the update is equivariant and
        its noise has independent, identically distributed entries, W_t is a run without shuffling, with noise Q_{t−1}⁻¹z_t that
        has the distribution of z_t whatever the Q are; so the process W is independent of all Q. Each permutation being uniform
        and fresh, Q at the times of release t₁ < t₂ < … are independent and uniform, and what is released is Q_{t_k}·W_{t_k}.
        With ``"on_release"`` W is the run itself, and what is released is P_k·W_{t_k} with fresh, uniform and independent P_k:
        **the same joint distribution**. No ε is smaller for it: the unshuffled accountant is valid (post-processing), and
        nothing smaller is valid for every data set: a gradient with equal entries looks the same after any permutation. Two
        releases a small step apart can be matched, which shows the permutation between them.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: PermutationSpec,
        optimizer: torch.optim.Optimizer,
        *,
        mode: str = "every_step",
        generator: torch.Generator | None = None,
        synchronise: bool = False,
        executor: str = "auto",
        storage: str = "in_place",
    ) -> None:
        instance_of("spec", spec, (PermutationSpec,))
        one_of("shuffle_mode", mode, MODES)
        check_generator("shuffle_generator", generator)
        self.spec, self.mode = spec, mode
        self.steps = self.shuffles = 0
        self._network = unwrap(module)
        self._optimizer = innermost(optimizer)
        refuse_optimizer(self._optimizer)
        tensors = spec.tensors(self._network)
        if not tensors:
            raise ValueError("spec moves nothing: an empty PermutationSpec shuffles no weights")
        trained = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        if not any(id(tensor) in trained for tensor in tensors.values()):
            raise ValueError(f"optimizer {type(self._optimizer).__name__} trains none of the parameters that would move")
        spec.followers(tensors, self._optimizer)
        self._generator = generator
        self._keys = KeyChain()
        self._executor, self._storage = executor, storage
        self._changed = False  # since the last release
        self._plan: PermutationPlan | None = None  # from the run itself to what was released last
        self._running: list[FrameType] = []
        self._synchronised = synchronise
        self._versions: list[int] = []  # of the parameters when the plan was drawn
        if synchronise:
            self._synchronise()
        for each in (self._network, self._optimizer):
            if (previous := _attached(each)) is not None:
                self._changed |= previous._private
                previous._end()
                previous._changed, previous._plan = False, None  # it is ours now
            _ATTACHED[each] = weakref.ref(self)
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        ]
        if mode == "on_release":
            self._handles += [
                part.register_state_dict_post_hook(_Release(self, part, name))  # type: ignore[no-untyped-call]
                for name, part in self._network.named_modules()
            ]
            # What is loaded may be what was shown, of one part alone: let the run be what was shown, too.
            self._handles += [
                part.register_load_state_dict_pre_hook(_Load(self, part))  # type: ignore[no-untyped-call]
                for part in self._network.modules()
            ]
            self._handles += [
                self._optimizer.register_state_dict_post_hook(self._release_optimizer),
                self._optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load()),
            ]

    def shuffle_(self) -> None:
        """Draws a permutation and moves everything by it, now."""
        followers = self._followers()
        self.spec.move(followers, self._draw(), executor=self._executor, storage=self._storage)
        self._changed, self._plan = False, None

    def release(self) -> None:
        """Permutes the run itself if it was not since its last update: for ways out other than ``state_dict``.

        What ``state_dict`` has shown since that update is what it becomes. In mode ``"every_step"`` there is nothing to do.

        Raises:
            ValueError: In the middle of a batch.
        """
        if self._private:
            if self._in_the_middle():
                raise ValueError("release() in the middle of a batch: its gradients would be left behind; step first")
            followers = self._followers()
            plan: Any = self._released()
            if self._synchronised:  # another rank may have shown another one, or none
                data: list[Any] = [plan, self.shuffles]
                torch.distributed.broadcast_object_list(data, 0)
                plan, self.shuffles = data
                self._synchronise()
            self.spec.move(followers, plan, executor=self._executor, storage=self._storage)
        self._changed, self._plan = False, None

    def detach(self) -> None:
        """Stops shuffling; a run that was not released as it is is permuted once more.

        Raises:
            ValueError: If it would have to be, in the middle of a batch.
        """
        self.release()
        self._end()

    @property
    def _private(self) -> bool:
        """Whether the run itself is not what was released."""
        return self._changed or self._plan is not None

    def _end(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for each in (self._network, self._optimizer):
            if _attached(each) is self:
                del _ATTACHED[each]

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as it would have: secret, since it tells all permutations to come.

        By default it tells none that were; the state of a generator of your own can be run backwards to them.
        """
        return {
            "key": self._keys.key,
            "generator": None if self._generator is None else self._generator.get_state(),
            "steps": self.steps,
            "shuffles": self.shuffles,
        }

    def check_state_dict(self, state: Any) -> None:
        """Refuses what :meth:`load_state_dict` could not load.

        Raises:
            ValueError: If it is no state of a shuffler, or one is with a generator of the caller's and the other without.
        """
        if not isinstance(state, dict) or set(state) != {"key", "generator", "steps", "shuffles"}:
            raise ValueError(f"state must come from WeightShuffler.state_dict(), got {type(state).__name__}")
        if (state["generator"] is None) != (self._generator is None):
            raise ValueError("state was saved with a shuffle_generator and loaded without, or the reverse: use the same")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, with the weights that were released then.

        Raises:
            ValueError: See :meth:`check_state_dict`.
        """
        self.check_state_dict(state)
        if self._generator is not None:
            self._generator.set_state(state["generator"])
        self._keys = KeyChain(state["key"])
        self.steps, self.shuffles = state["steps"], state["shuffles"]
        self._changed, self._plan = False, None

    def _draw(self) -> PermutationPlan:
        """A fresh permutation."""
        self.shuffles += 1
        return self.spec.sample(self._keys.next_generator() if self._generator is None else self._generator)

    def _followers(self) -> dict[str, list[torch.Tensor]]:
        """All that moves; buffers may be other tensors than at the start."""
        return self.spec.followers(self.spec.tensors(self._network), self._optimizer)

    def _before_update(self, *_: Any) -> None:
        """An update begins, perhaps inside of another one (wrappers such as lookahead)."""
        self._running = [frame for frame in self._running if frame in _callers()] + [sys._getframe(1)]

    def _after_update(self, *_: Any) -> None:
        """The optimizer has changed the weights."""
        here = sys._getframe(1)
        self._running = [frame for frame in self._running if frame is not here and frame in _callers()]
        if self._running:
            return
        self.steps += 1
        self._changed = True
        if self.mode == "every_step":
            self.shuffle_()
        elif self.steps == 1:  # now its state is there
            self._followers()

    def _before_load(self) -> None:
        """The run becomes what was shown, so that loading that is no change."""
        if self._private and self._in_the_middle():
            raise ValueError("loading in the middle of a batch would leave its gradients behind: call zero_grad() first")
        self.release()

    def _in_the_middle(self) -> bool:
        """Whether gradients wait for a step."""
        return any(waits_for_step(parameter) for parameter in self._network.parameters())

    def _released(self) -> PermutationPlan | None:
        """By what the weights that leave now are permuted."""
        now = [tensor._version for tensor in self._network.parameters()]
        if self._changed or (self._plan is not None and self._versions != now):  # loaded, say: a plan must not be used twice
            self._plan, self._changed, self._versions = self._draw(), False, now
        return self._plan

    def _release_part(self, part: nn.Module, place: str, state: dict[str, Any], prefix: str) -> None:
        """Puts permuted copies in the place of all that is the run's own; what was one tensor stays one."""
        plan = self._released()
        canonical = {alias: name for name, aliases in self.spec.aliases.items() for alias in aliases}
        names: dict[int, str] = {}
        places: dict[int, list[str]] = {}
        own: dict[tuple[Any, ...], torch.Tensor] = {}
        for key, tensor in (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)):
            places.setdefault(id(tensor), []).append(prefix + key)
            own[tensor.data_ptr(), tensor.shape, tensor.stride()] = tensor
            name = f"{place}.{key}" if place else key
            if (name := canonical.get(name, name)) in self.spec.blocks:
                names[id(tensor)] = name
        copies: dict[int, torch.Tensor] = {}
        moving: dict[str, list[torch.Tensor]] = {}
        for key, value in state.items():
            if not (key.startswith(prefix) and isinstance(value, torch.Tensor)):
                continue
            found = own.get((value.data_ptr(), value.shape, value.stride()))
            if found is None:  # a copy already, or not the run's
                continue
            if id(found) not in copies:
                copied = value.detach().clone()
                is_parameter = isinstance(value, nn.Parameter)
                copies[id(found)] = nn.Parameter(copied, value.requires_grad) if is_parameter else copied
                if id(found) in names:
                    moving[names[id(found)]] = [copied]
            state[key] = copies[id(found)]
        if plan is not None and moving:
            self.spec.move(moving, plan, executor=self._executor)
        for keys in places.values():
            present = [key for key in keys if key in state]
            for other in present[1:]:
                state[other] = state[present[0]]

    def _release_optimizer(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A permuted copy of the optimizer's state."""
        state = copy.deepcopy(state)
        plan = self._released()
        if plan is not None:
            names = {id(tensor): name for name, tensor in self.spec.tensors(self._network).items()}
            parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
            moving = {
                names[id(parameter)]: [
                    value for value in state["state"][number].values() if isinstance(value, torch.Tensor) and value.dim()
                ]
                for number, parameter in enumerate(parameters)
                if id(parameter) in names and number in state["state"]
            }
            self.spec.move(moving, plan, executor=self._executor)
        return state

    def _synchronise(self) -> None:
        """Rank 0's secret for all."""
        device = next(iter(self.spec.tensors(self._network).values())).device
        if torch.distributed.get_backend() == "gloo":
            device = torch.device("cpu")
        if self._generator is not None:
            state = self._generator.get_state().to(device)
            torch.distributed.broadcast(state, 0)
            self._generator.set_state(state.cpu())
        key = torch.tensor(list(self._keys.key), dtype=torch.uint8, device=device)
        torch.distributed.broadcast(key, 0)
        self._keys = KeyChain(bytes(key.cpu().tolist()))


class _Release:
    """The state-dict hook of one module of the network, inert in copies of it."""

    def __init__(self, shuffler: WeightShuffler | None, part: nn.Module | None = None, place: str = "") -> None:
        self._shuffler, self._part, self._place = shuffler, part, place

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Permutes what leaves."""
        if self._shuffler is not None and module is self._part:
            self._shuffler._release_part(module, self._place, state, prefix)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Release:
        """A copy of the network is not trained by our optimizer."""
        return _Release(None)

    def __reduce__(self) -> Any:
        """Whole modules leave by pickling, which no hook sees in time."""
        if self._shuffler is not None and self._shuffler._private:
            raise ValueError(
                "saving the whole module would show weights that were not permuted since their last update: save state_dict(), "
                "or call release() first"
            )
        return _Release, (None,)


class _Load:
    """The hook of one module that is about to load weights, inert in copies of it."""

    def __init__(self, shuffler: WeightShuffler | None, part: nn.Module | None = None) -> None:
        self._shuffler, self._part = shuffler, part

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Releases the run."""
        if self._shuffler is not None and module is self._part:
            self._shuffler._before_load()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Load:
        """A copy of the network is not trained by our optimizer."""
        return _Load(None)

    def __reduce__(self) -> Any:
        """Pickled without the run."""
        return _Load, (None,)


def _callers() -> list[FrameType]:
    """The frames that are running."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of Opacus's."""
    while hasattr(optimizer, "original_optimizer"):
        optimizer = optimizer.original_optimizer
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    return optimizer


def detach_shuffler(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Ends the work of a shuffler that an earlier set-up has left at this network or optimizer, if there is one."""
    if (previous := _attached(owner)) is not None:
        previous.detach()


def _attached(owner: nn.Module | torch.optim.Optimizer) -> WeightShuffler | None:
    """The shuffler of a network or an optimizer."""
    reference = _ATTACHED.get(owner)
    return None if reference is None else reference()


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Says no to optimizers that are known not to treat the entries of a tensor alike, or keep tensors where nobody looks."""
    if isinstance(optimizer, FLAT_STATE):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} keeps factored, flat or sparse state, which cannot follow a permutation of "
            f"the "
            "weights: use SGD, Adam, AdamW or RMSprop"
        )
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, value in vars(optimizer).items():
        known = name in ("state", "param_groups", "defaults")
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
        if not known and any(leaf.numel() > 1 for leaf in tensors):
            raise ValueError(
                f"optimizer {type(optimizer).__name__} keeps tensors in its attribute {name!r}, outside of its state, where "
                "they cannot follow a permutation of the weights: use SGD, Adam, AdamW or RMSprop"
            )
