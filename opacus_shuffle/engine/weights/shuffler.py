"""Permuting a network's weights, and what belongs to them, while an optimizer trains it: ``WeightShuffler``."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed
from torch import nn
from torch.optim.swa_utils import AveragedModel

from opacus_shuffle.core.opacus_compat import waits_for_step
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import instance_of, integer, one_of
from opacus_shuffle.engine.weights.attached import ATTACHED, MOVED, attached
from opacus_shuffle.engine.weights.averages import bring_up_to_date, refuse_begun
from opacus_shuffle.engine.weights.copies import CopyHook, PartHook, TensorHook
from opacus_shuffle.engine.weights.optimizers import (
    after_each_update,
    innermost,
    keeps_state,
    refuse_optimizer,
    run_first,
    warn_of_state_that_stays,
)
from opacus_shuffle.engine.weights.released_state import moving_tensors, parts_of, permute_state, permuted_optimizer_state
from opacus_shuffle.engine.weights.secret import Secret
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec

MODES = ("every_step", "on_release")


class WeightShuffler:
    """Moves parameters, buffers, gradients and same-shape optimizer state by fresh uniform permutations.

    Args:
        module: The network or a wrapper of it.
        spec: The group to draw from, of this network.
        optimizer: Trains all of it that is trained (the state of a second optimizer would not follow); Opacus's optimizers are
            followed to the one inside. A shuffler that was there before is replaced.
        mode: ``"every_step"``: after every update, as in Yang, Ji and Xiang's weight shuffling (Algorithm 1).
            ``"on_release"``: what ``state_dict`` of the network and of the optimizer return, copies and pickles are permuted,
            by one permutation until the next update, and the run itself goes on where it is. Other ways out, such as
            ``parameters()``, need a call of :meth:`release` before (docs/weight_shuffling.rst). What was shown is to be loaded
            again as a whole: weights and optimizer state.
        generator: On the CPU; by default a chain of keys from the operating system, which cannot be run backwards. Pass your
            own to repeat a run, and never on real data.
        synchronise: All ranks of the default process group draw the same permutations, by rank 0's secret.

    Attributes:
        steps: Updates seen.
        shuffles: Permutations drawn.

    Raises:
        ValueError: If the network or the optimizer does not fit.

    Formal Guarantees:
        Both modes release the same joint distribution: W_{t_1}, W_{t_2}, … of a run without shuffling, each moved by a fresh,
        uniform and independent permutation (Theorem 4.3 of docs/proofs/04_joint_distribution_of_releases.md). So the unshuffled
        accountant is valid, and nothing smaller is valid for every data set. Two releases a small step apart can be matched,
        which shows the permutation between them.
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
    ) -> None:
        instance_of("spec", spec, (PermutationSpec,))
        one_of("mode", mode, MODES)
        check_generator("generator", generator)
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
        for previous in (attached(self._network), attached(self._optimizer)):
            if previous is not None and (mode == "every_step" or previous._network is not self._network):
                previous.release()  # we do not look at what would leave of it before the next update
        self._known = {name for name, _ in self._network.named_parameters(remove_duplicate=False)}
        self._secret = Secret(generator)
        self._changed = False  # since the last release
        self._loaded: frozenset[str] = frozenset()  # since the last update
        self._warned = -1
        self._plan: PermutationPlan | None = None  # from the run itself to what was released last
        self._averages: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # their parts, with places
        self._hooks: weakref.WeakSet[PartHook] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._synchronised = synchronise
        self._versions: list[tuple[int, int]] = []  # of the parameters when the plan was drawn
        self._tables = [part._parameters for part in self._network.modules() if part._parameters]
        if synchronise:
            self._secret.share()
        for each in (self._network, self._optimizer):
            if (previous := attached(each)) is not None:
                self._changed |= previous._private
                previous.end()
                previous._changed, previous._plan = False, None  # it is ours now
                if previous._network is self._network:
                    self._averages.update(previous._averages)
            ATTACHED[each] = weakref.ref(self)
        self._watch_optimizer()
        for part, place in [*parts_of(self._network), *self._averages.items()]:
            self._watch(part, place)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a WeightShuffler cannot be copied or pickled: it moves the weights of its own network alone; keep its "
            "state_dict(), or engine.save_checkpoint(...)"
        )

    def shuffle_(self) -> None:
        """Draws a permutation and moves everything by it, now.

        Raises:
            ValueError: In the middle of a batch.
        """
        self._refuse_middle("shuffle_()", "step")
        self._shuffle()

    def _shuffle(self) -> None:
        followers = self._followers()
        self.spec.move(followers, self._draw())
        self._changed, self._plan = False, None

    def release(self) -> None:
        """Permutes the weights in memory if they were not since their last update, for ways out that nobody sees.

        They become what ``state_dict`` has shown since that update. In mode ``"every_step"`` there is nothing to do.

        Raises:
            ValueError: In the middle of a batch.
        """
        if self._private:
            self._refuse_middle("release()", "step")
            followers = self._followers()
            plan: Any = self._released()
            if self._synchronised:  # another rank may have shown another one, or none
                data: list[Any] = [plan, self.shuffles]
                torch.distributed.broadcast_object_list(data, 0)
                plan, self.shuffles = data
                self._secret.share()
            self.spec.move(followers, plan)
        self._changed, self._plan = False, None

    def detach(self) -> None:
        """Stops shuffling, after a last :meth:`release`."""
        self.release()
        self.end()

    def follow(self, average: nn.Module) -> None:
        """Has an average of the network's weights follow their permutations, beginning with the weights of now.

        ``torch.optim.swa_utils.AveragedModel`` follows by itself if it is made while the shuffler is attached, or updated from
        the private model. Averages of other libraries do so from this call on, as does any copy that is updated from the
        network's ``parameters()``.

        Args:
            average: A copy of the network, or a wrapper of one; its weights are overwritten.

        Raises:
            ValueError: If it is no copy.
        """
        for part, place in parts_of(bring_up_to_date(average, self._network)):
            if part not in self._averages:
                self._averages[part] = place
                self._watch(part, place)

    def follow_reader(self, average: AveragedModel) -> None:
        """Has an average follow that is about to read the network's parameters; refuses one that has read others before."""
        if self._handles and unwrap(average) not in self._averages:
            refuse_begun(average)
            self.follow(average)

    @property
    def _private(self) -> bool:
        """Whether the weights in memory are other than those that were shown or permuted last."""
        return self._changed or self._plan is not None

    def end(self) -> None:
        """Removes all hooks, whatever was released."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for hook in self._hooks:
            hook.forget()
        for part, place in [*parts_of(self._network), *self._averages.items()]:
            CopyHook.forget(part)
            for _, tensor in self._moving(part, place):
                TensorHook.forget(tensor)
        vars(self._optimizer).pop("__reduce_ex__", None)
        for each in (self._network, self._optimizer):
            if attached(each) is self:
                del ATTACHED[each]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to draw the same permutations: secret, since it tells all that are to come.

        By default it tells none that were drawn; the state of a generator of your own can be run backwards to them.
        """
        return {**self._secret.state(), "steps": self.steps, "shuffles": self.shuffles}

    def check_state_dict(self, state: Any) -> None:
        """Refuses what :meth:`load_state_dict` could not load."""
        if not isinstance(state, dict) or set(state) != {"key", "generator", "steps", "shuffles"}:
            raise ValueError(f"state must come from WeightShuffler.state_dict(), got {type(state).__name__}")
        for name in ("steps", "shuffles"):
            integer(f"{name} in state", state[name], minimum=0)
        self._secret.check(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, if it passes :meth:`check_state_dict`, with the weights that were released then."""
        self.check_state_dict(state)
        self._secret.load(state)
        self.steps, self.shuffles = state["steps"], state["shuffles"]
        self._changed, self._plan = False, None

    def remember(self) -> Callable[[], None]:
        """Returns what puts everything back as it is now: the secret, what is due, and where tensors would be moved, these."""
        tensors = [each for moved in self._followers().values() for each in moved] if self._private else []
        values = [each.detach().clone() for each in tensors]
        attributes, secret = dict(self.__dict__), self._secret.state()

        def undo() -> None:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            self.__dict__.update(attributes)
            self._secret.load(secret)
            self._versions = self._now()

        return undo

    def _draw(self) -> PermutationPlan:
        self.shuffles += 1
        MOVED.add(self._network)
        return self.spec.sample(self._secret.next_generator())

    def _followers(self) -> dict[str, list[torch.Tensor]]:
        """Returns all that moves; buffers may be other tensors than at the start."""
        found = self.spec.followers(self._tensors(), self._optimizer)
        for part, place in [*self._averages.items()]:
            for name, tensor in self._moving(part, place):
                if not any(tensor is each for each in found[name]):
                    found[name].append(tensor)
        return found

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns what moves of the network; refuses one whose layers are others than when its permutations were found."""
        names = [name for name, _ in self._network.named_parameters(remove_duplicate=False) if name not in self._known]
        found = self.spec.tensors(self._network)
        if names:
            raise ValueError(
                f"module has got new parameters since its permutations were found, {', '.join(names)}, which may not fit the "
                "units that move: take them out, or call make_private again"
            )
        return found

    def _moving(self, part: nn.Module, place: str) -> list[tuple[str, torch.Tensor]]:
        return moving_tensors(self.spec, part, place, recurse=False)

    def _watch_optimizer(self) -> None:
        """Hooks the updates of the optimizer, and what leaves of it."""
        self._handles += after_each_update(self._optimizer, self._after_update)
        self._handles.append(self._optimizer.register_load_state_dict_pre_hook(self._before_load))
        if self.mode == "on_release":
            self._handles.append(self._optimizer.register_state_dict_post_hook(self._release_optimizer, prepend=True))
            vars(self._optimizer)["__reduce_ex__"] = self._reduce_optimizer

    def _watch(self, part: nn.Module, place: str) -> None:
        """Hooks what leaves of a part of the network, or of an average of it, that stands at this place."""
        # What is loaded may be what was shown, of one part alone: let the run be what was shown, too.
        load = self._hook(self._before_load, part, place)
        self._handles.append(part.register_load_state_dict_pre_hook(load))  # type: ignore[no-untyped-call]
        if self.mode == "on_release":
            release = self._hook(functools.partial(self._release_part, place), part, place)
            tracing = self._hook(self._refuse_tracing, part, place)
            self._handles.append(run_first(part.register_state_dict_post_hook(release)))  # type: ignore[no-untyped-call]
            self._handles.append(part.register_forward_pre_hook(tracing, prepend=True))
            self._watch_tensors(place, part)
            CopyHook(weakref.ref(part), functools.partial(self._watch_tensors, place)).watch()

    def _watch_tensors(self, place: str, part: nn.Module) -> None:
        """Hooks what leaves of a part's own tensors: loading and conversions may have put others in their place."""
        for name, tensor in self._moving(part, place):
            if not TensorHook.watches(tensor):
                TensorHook(weakref.ref(tensor), functools.partial(self._release_copy, name), self._warn_of_vector).watch()

    def _hook(self, act: Callable[..., None], part: nn.Module, place: str) -> PartHook:
        hook = PartHook(act, weakref.ref(part), functools.partial(self._averaged, act, place), self._refuse_sharing)
        self._hooks.add(hook)
        return hook

    def _averaged(self, act: Callable[..., None], place: str, part: nn.Module) -> PartHook:
        """Has a part of an average follow; returns a hook of it."""
        self._averages[part] = place
        if self.mode == "on_release":
            CopyHook(weakref.ref(part), functools.partial(self._watch_tensors, place)).watch()
        return self._hook(act, part, place)

    def _after_update(self) -> None:
        """Shuffles after an update, or notes that the weights have changed."""
        self.steps += 1
        self._changed = True
        if self._loaded == {"weights"}:
            warn_of_state_that_stays(self._optimizer)
        self._loaded = frozenset()
        if self.mode == "every_step":
            self._shuffle()
        elif self.steps == 1:  # now its state is there
            self._followers()

    def _before_load(self, owner: Any, *_: Any) -> None:
        """Makes the weights in memory those that were shown, so that loading these changes nothing."""
        if self._private:
            self._refuse_middle("loading", "call zero_grad()")
        self.release()
        if owner not in self._averages and (owner is self._optimizer or keeps_state(self._optimizer)):
            self._loaded |= {"state" if owner is self._optimizer else "weights"}

    def _refuse_middle(self, what: str, remedy: str) -> None:
        if any(waits_for_step(parameter) for parameter in self._network.parameters()):
            raise ValueError(f"{what} in the middle of a batch would leave its gradients behind: {remedy} first")

    def _released(self) -> PermutationPlan | None:
        """Returns the permutation of the weights that leave now, None for none."""
        now = self._now()
        if self._changed or (self._plan is not None and self._versions != now):  # loaded, say: a plan must not be used twice
            self._tensors()
            self._plan, self._changed, self._versions = self._draw(), False, now
        return self._plan

    def _now(self) -> list[tuple[int, int]]:
        """Returns which parameters there are, and how often each was written to; asked for often, so without a walk."""
        return [(id(each), each._version) for table in self._tables for each in table.values() if each is not None]

    def _release_part(self, place: str, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        permute_state(self.spec, self._released(), part, place, state, prefix)

    def _release_optimizer(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        plan = self._released()
        return permuted_optimizer_state(self.spec, plan, self._network, self._optimizer, state)

    def _release_copy(self, name: str, copied: torch.Tensor) -> None:
        """Permutes the copy of one tensor."""
        if (plan := self._released()) is not None:
            self.spec.move({name: [copied]}, plan)

    def _reduce_optimizer(self, protocol: Any) -> Any:
        self._refuse(f"copying or pickling {type(self._optimizer).__name__}", "keep its state_dict()")
        return type(self._optimizer).__reduce_ex__(self._optimizer, protocol)

    def _refuse_sharing(self) -> None:
        self._refuse("handing the network's memory to another process", "pass copy.deepcopy(model)")

    def _refuse_tracing(self, *_: Any) -> None:
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self._refuse("exporting or tracing the network itself", "export copy.deepcopy(model).to_standard_module()")

    def _warn_of_vector(self) -> None:
        if self._private and self._warned != self.steps:
            self._warned = self.steps
            warnings.warn(
                "parameters_to_vector shows weights that were not permuted since their last update: call release() before if "
                "the vector leaves the run",
                stacklevel=4,
            )

    def _refuse(self, what: str, remedy: str) -> None:
        if self._private:
            raise ValueError(
                f"{what} would show weights that were not permuted since their last update: {remedy}, or call release() first"
            )
