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
from typing import Any

import torch
import torch.distributed
from torch import nn

from opacus_shuffle.permutation.network import unwrap
from opacus_shuffle.permutation.spec import PermutationSpec
from opacus_shuffle.randomness import KeyChain
from opacus_shuffle.validation import instance_of, one_of

MODES = ("every_step", "on_release")
FLAT_STATE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam)
"""Optimizers of PyTorch whose state is factored or flat, or whose updates are sparse, so that it cannot follow."""

_ATTRIBUTE = "_weight_shuffler"


class WeightShuffler:
    """Moves parameters, buffers, gradients and same-shape optimizer state by fresh uniform permutations.

    Args:
        module: The network or a wrapper of it.
        spec: The group to draw from, of this network.
        optimizer: Trains all of it that is trained (the state of a second optimizer would not follow); Opacus's optimizers are
            followed to the one inside. A shuffler that was there before is replaced.
        mode: ``"every_step"``: after every update (WS Algorithm 1). ``"on_release"``: when weights or optimizer state leave by
            ``state_dict``, if there was an update since the last time; costs nothing per step. What ``state_dict`` returns is a
            copy then. Ways out that nobody is told of, such as reading ``parameters()``, need a call of :meth:`release` before.
        generator: On the CPU; by default a chain of keys from the operating system, which cannot be run backwards. Pass your
            own to repeat a run, and never on real data.
        synchronise: All ranks of the default process group draw the same permutations, by rank 0's secret.
        executor: See :func:`opacus_shuffle.permutation.gather.gather_`.
        storage: See there.

    Attributes:
        steps: Updates seen.
        shuffles: Permutations drawn.

    Raises:
        ValueError: If the network or the optimizer does not fit.

    Formal Guarantees:
        Let Q_t be the product of all permutations up to step t and W_t = Q_t⁻¹·(the weights). As the update is equivariant and
        its noise has independent, identically distributed entries, W_t is a run without shuffling, with noise Q_{t−1}⁻¹z_t that
        has the law of z_t whatever the Q are; so the process W is independent of all Q. Each permutation being uniform and
        fresh, Q at the times of release t₁ < t₂ < … are independent and uniform, in both modes, and what is released is
        Q_{t_k}·W_{t_k}: **the two modes release the same joint law**. No ε is smaller for it: the unshuffled accountant is
        valid (post-processing), and nothing smaller is valid for every data set: a gradient with equal entries looks the same
        after any permutation. Two releases a small step apart can be matched, which shows the permutation between them.
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
        if generator is not None:
            instance_of("shuffle_generator", generator, (torch.Generator,))
            if generator.device.type != "cpu":
                raise ValueError(f"shuffle_generator must live on the CPU, got one on {generator.device}")
        self.spec, self.mode = spec, mode
        self.steps = self.shuffles = 0
        self._network = unwrap(module)
        self._optimizer = innermost(optimizer)
        self._tensors = spec.tensors(self._network)
        refuse_optimizer(self._optimizer)
        spec.followers(self._tensors, self._optimizer)
        self._generator = generator
        self._keys = KeyChain()
        self._executor, self._storage = executor, storage
        self._unreleased = False
        if synchronise:
            self._synchronise()
        previous = getattr(self._optimizer, _ATTRIBUTE, None)
        if previous is not None:
            previous.detach()
        setattr(self._optimizer, _ATTRIBUTE, self)
        self._handles = [self._optimizer.register_step_post_hook(self._after_update)]
        if mode == "on_release":
            self._handles += [
                self._network.register_state_dict_pre_hook(_BeforeRelease(self)),  # type: ignore[no-untyped-call]
                self._network.register_state_dict_post_hook(_AfterRelease(self)),  # type: ignore[no-untyped-call]
                self._optimizer.register_state_dict_pre_hook(lambda _: self.release()),
                self._optimizer.register_state_dict_post_hook(lambda _, state: copy.deepcopy(state)),
            ]

    def shuffle_(self) -> None:
        """Draws a permutation and moves everything by it, now."""
        plan = self.spec.sample(self._keys.next_generator() if self._generator is None else self._generator)
        self.spec.move(
            self.spec.followers(self._tensors, self._optimizer), plan, executor=self._executor, storage=self._storage
        )
        self.shuffles += 1
        self._unreleased = False

    def release(self) -> None:
        """Permutes weights that changed since the last release; call it before they leave by a way other than ``state_dict``.

        In mode ``"every_step"`` they are permuted already.
        """
        if self._unreleased:
            self.shuffle_()

    def detach(self) -> None:
        """Stops shuffling; weights changed since the last release are permuted once more."""
        self.release()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if getattr(self._optimizer, _ATTRIBUTE, None) is self:
            delattr(self._optimizer, _ATTRIBUTE)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as it would have: secret, since it tells all permutations to come (none that were)."""
        return {
            "key": self._keys.key,
            "generator": None if self._generator is None else self._generator.get_state(),
            "steps": self.steps,
            "shuffles": self.shuffles,
            "unreleased": self._unreleased,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`.

        Raises:
            ValueError: If it is none, or one is with a generator of the caller's and the other without.
        """
        if not isinstance(state, dict) or set(state) != {"key", "generator", "steps", "shuffles", "unreleased"}:
            raise ValueError(f"state must come from WeightShuffler.state_dict(), got {type(state).__name__}")
        if (state["generator"] is None) != (self._generator is None):
            raise ValueError(
                "state was saved with a shuffle_generator and loaded without, or the other way round: use the same"
            )
        if self._generator is not None:
            self._generator.set_state(state["generator"])
        self._keys = KeyChain(state["key"])
        self.steps, self.shuffles, self._unreleased = state["steps"], state["shuffles"], state["unreleased"]

    def _after_update(self, *_: Any) -> None:
        """The optimizer has changed the weights."""
        self.steps += 1
        self._unreleased = True
        if self.mode == "every_step":
            self.shuffle_()

    def _synchronise(self) -> None:
        """Rank 0's secret for all."""
        device = next(iter(self._tensors.values())).device
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
    """A state-dict hook of one network, inert in copies of it."""

    def __init__(self, shuffler: WeightShuffler | None) -> None:
        self._shuffler = shuffler

    def _concerns(self, module: nn.Module) -> bool:
        """Whether this is the network itself."""
        return self._shuffler is not None and module is self._shuffler._network

    def __deepcopy__(self, memo: dict[int, Any]) -> _Release:
        """A copy of the network is not trained by our optimizer."""
        return type(self)(None)

    def __reduce__(self) -> Any:
        """Whole modules leave by pickling, which no hook sees in time."""
        if self._shuffler is not None and self._shuffler._unreleased:
            raise ValueError(
                "saving the whole module would show weights that were not permuted since their last update: save state_dict(), "
                "or call release() first"
            )
        return type(self), (None,)


class _BeforeRelease(_Release):
    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Permutes the weights that are about to leave."""
        if self._shuffler is not None and self._concerns(module):
            self._shuffler.release()


class _AfterRelease(_Release):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Copies what has left, lest later updates show in it."""
        if self._concerns(module):
            for name, value in state.items():
                if name.startswith(prefix) and isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                    state[name] = value.clone()


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of Opacus's."""
    while hasattr(optimizer, "original_optimizer"):
        optimizer = optimizer.original_optimizer
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    return optimizer


def detach_shuffler(optimizer: Any) -> None:
    """Ends the work of a shuffler that an earlier set-up has left at this optimizer, if there is one."""
    previous = getattr(innermost(optimizer), _ATTRIBUTE, None)
    if previous is not None:
        previous.detach()


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Says no to optimizers that are known not to treat the entries of a tensor alike."""
    if isinstance(optimizer, FLAT_STATE):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} keeps factored, flat or sparse state, which cannot follow a permutation of "
            f"the "
            "weights: use SGD, Adam, AdamW or RMSprop"
        )
