"""Saves and loads private runs: a checkpoint holds weights together with their account.

A checkpoint is written whole or not at all, and loading runs no code of the file. A checkpoint is
loaded into an engine that has accounted nothing yet; an engine that holds rounds refuses it, unless
``allow_rewind=True`` says that nobody saw a result of these rounds.

Weights that are loaded into a private network without their account raise a warning. The state
dicts of a private network contain a mark for this purpose: a random name of the accountant's run
and how many rounds were accounted. Weights whose marks the accountant accounts for raise no
warning: those of its own run, and those of the run whose checkpoint was loaded.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import warnings
from typing import Any

import opacus
import torch
from torch import nn

from opacus_shuffle.accountants import PrivacyAssumptionWarning, ShuffleAccountant
from opacus_shuffle.accountants.accountant import names_in
from opacus_shuffle.accountants.history import check_load, number_of_rounds, read_history
from opacus_shuffle.core.atomic_file import atomic_write
from opacus_shuffle.core.plain_values import plain
from opacus_shuffle.core.validation import boolean, instance_of, integer
from opacus_shuffle.engine.guards.raw_gradients import OWNER, private_optimizers
from opacus_shuffle.engine.step.weight_shuffler import WeightShuffler
from opacus_shuffle.networks.running import rolled_back_if_refused, unwrap

_MARK = "opacus_shuffle"
_SHUFFLER, _ACCOUNT = "opacus_shuffle", "opacus_shuffle_account"
_WEIGHTS, _ROUNDS = "module_state_dict", "privacy_accountant_state_dict"
_STATES = ("optimizer_state_dict", "noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")
WITHOUT_ACCOUNT = "weights were loaded into a private network without their account"


class CheckpointMixin(opacus.PrivacyEngine):
    """Saves and loads what a run needs to go on.

    Attributes:
        shuffler: Permutes the weights of the latest ``make_private``; None without
            ``shuffle_weights``.
        tickets: Weak references to the tickets of runs whose batches have secret sizes.
    """

    shuffler: WeightShuffler | None = None
    tickets: tuple[Any, ...] = ()
    accountant: Any  # Opacus's, untyped

    def save_checkpoint(  # type: ignore[override]
        self,
        *,
        path: Any,
        module: torch.nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Saves a run as :meth:`opacus.PrivacyEngine.save_checkpoint`, whole or not at all.

        What it writes is read back without running code.

        A file is written beside ``path``, flushed to the disk and renamed, so that a process killed
        at any moment leaves the earlier checkpoint or the new one. Weights and accounting are in
        the same file: keep no weights without theirs (docs/checkpoints.rst). With
        ``shuffle_weights`` it holds the secret of the permutations to come, too. That secret says
        nothing about the permutations so far (a generator of your own does). Still, publish
        ``module.state_dict()``, not checkpoints. NumPy's numbers are written as Python's; functions
        of schedulers are not written.

        Args:
            path: As Opacus's; a file object is written to directly.
            module: As Opacus's.
            optimizer: As Opacus's.
            noise_scheduler: As Opacus's.
            grad_clip_scheduler: As Opacus's.
            checkpoint_dict: As Opacus's; it stays as it is.
            module_state_dict_kwargs: As Opacus's.
            torch_save_kwargs: As Opacus's.

        Warns:
            UserWarning: If ``checkpoint_dict`` or another part holds what :meth:`load_checkpoint`
                will not read by default.

        Raises:
            ValueError: If another engine accounts for the module's steps; or if training went on
                meanwhile, so that the weights might hold more than their accounting. The earlier
                checkpoint stays.
        """
        self._check_parts(path, module, optimizer)
        accounted, foreign = copy.copy(self.accountant.history), set[str]()
        saved = dict(instance_of("checkpoint_dict", checkpoint_dict or {}, (dict,)))
        saved[_WEIGHTS] = module.state_dict(**(module_state_dict_kwargs or {}))
        saved[_ROUNDS] = self.accountant.state_dict()
        if self.shuffler is not None:
            saved[_SHUFFLER] = self.shuffler.state_dict()
        parts = (optimizer, noise_scheduler, grad_clip_scheduler)
        for key, part in zip(_STATES, parts, strict=True):
            if part is not None:
                state = part.state_dict().items()
                saved[key] = {name: value for name, value in state if not callable(value)}
        saved[_ACCOUNT] = {
            "runs": _accounted(unwrap(module)) or {},
            "rewound": self.accountant.rewound,
            "predictable": list(self.accountant.predictable),
            "unchecked": list(self.accountant.unchecked),
        }
        saved = plain(saved, foreign)
        with atomic_write(path) as file:
            torch.save(saved, file, **(torch_save_kwargs or {}))
            if self.accountant.history != accounted:
                raise ValueError(
                    "a step was taken while the checkpoint was written: its weights may contain "
                    "that step, and its accounting does not; save between steps, in the thread "
                    "that trains"
                )
        if foreign:
            warnings.warn(
                f"the checkpoint holds {', '.join(sorted(foreign))}, which load_checkpoint reads "
                "only with allow_pickle=True: save tensors, numbers, strings, lists and "
                "dictionaries instead",
                stacklevel=2,
            )

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: torch.nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        allow_rewind: bool = False,
        allow_pickle: bool = False,
    ) -> dict[str, Any]:
        """Loads a run as :meth:`opacus.PrivacyEngine.load_checkpoint`, or refuses it whole.

        No code of the file runs: PyTorch's reader of tensors and plain values reads it, whatever
        ``torch_load_kwargs`` says, and a file that needs more is refused.

        The engine must not have accounted any rounds, because a load would replace them.
        Permutations of weights go on from where the saved run was. Gradients that wait for a step
        are dropped, because they belong to the earlier weights.

        Args:
            path: As Opacus's.
            module: As Opacus's.
            optimizer: As Opacus's.
            noise_scheduler: As Opacus's.
            grad_clip_scheduler: As Opacus's.
            module_load_dict_kwargs: As Opacus's.
            torch_load_kwargs: As Opacus's, but for ``weights_only`` and ``pickle_module``, which
                ``allow_pickle`` decides.
            allow_rewind: Replace accounted rounds by those of the checkpoint. This is right only if
                nobody ever saw a result of the replaced rounds: no weights, losses or predictions.
                Reports and :meth:`get_epsilon` mention how many were replaced.
            allow_pickle: Let the file run any code, as Opacus does. Use it for files with other
                objects, from an author you trust. Reports mention it from then on.

        Returns:
            As Opacus's.

        Raises:
            ValueError: If the engine has accounted rounds and ``allow_rewind`` is False; if the
                file cannot be read, needs more than ``allow_pickle=False`` allows, lacks a part, is
                malformed, or belongs to a run with another accountant, data set or plan. PyTorch's
                own errors are raised as well. In every case modules, optimizers, schedulers,
                accounting and shuffling are as before.
            FileNotFoundError: If there is no such file.
        """
        boolean("allow_rewind", allow_rewind)
        boolean("allow_pickle", allow_pickle)
        self._check_parts(path, module, optimizer)
        saved = _read(path, torch_load_kwargs or {}, allow_pickle)
        runs, rewound, predictable, unchecked = _account_facts(saved)
        parts = dict(zip(_STATES, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True))
        with rolled_back_if_refused(module, *parts.values(), self.shuffler, self.accountant):
            accountant = copy.deepcopy(self.accountant)
            if isinstance(accountant, ShuffleAccountant):
                accountant.load_state_dict(saved[_ROUNDS], allow_rewind=allow_rewind)
            else:
                accounted = number_of_rounds(read_history(accountant.history))
                check_load(accounted, allow_rewind=allow_rewind)
                accountant.load_state_dict(copy.deepcopy(saved[_ROUNDS]))
                read_history(accountant.history)  # refuses a malformed one
                accountant.rewound += rewound + accounted
            accountant.predictable = tuple(dict.fromkeys((*accountant.predictable, *predictable)))
            unchecked = (
                *accountant.unchecked,
                *unchecked,
                *(["pickled_file"] if allow_pickle else []),
            )
            accountant.unchecked = tuple(dict.fromkeys(unchecked))
            accountant.loaded_runs = {**accountant.loaded_runs, **runs}
            if self.shuffler is not None and _SHUFFLER in saved:
                self.shuffler.load_state_dict(saved[_SHUFFLER])
            # The account comes before the weights, in case of an interrupt.
            vars(self.accountant).update(vars(accountant))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", WITHOUT_ACCOUNT)
                module.load_state_dict(saved[_WEIGHTS], **(module_load_dict_kwargs or {}))
            for key, part in parts.items():
                state = saved.pop(key, {})
                if part is not None and len(state):
                    part.load_state_dict(state)
                elif key == _STATES[0] and (part is not None or len(state)):
                    given = "not" if part is None else ""
                    warnings.warn(
                        f"{key} has {len(state)} items but optimizer is {given} provided.",
                        stacklevel=2,
                    )
            for private in private_optimizers(module):
                private.forget_batch()
        return saved

    def _check_parts(self, path: Any, module: Any, optimizer: Any) -> None:
        """Refuses a bad path, module or optimizer, and a module of another engine."""
        if not (hasattr(path, "read") or hasattr(path, "write")):
            name = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
            if not name or "\0" in name or os.path.isdir(name):
                raise ValueError(
                    f"path must be the name of a file or an open file, got {path!r}: pass a name "
                    "such as 'run.pt'"
                )
        instance_of("module", module, (nn.Module,))
        instance_of("optimizer", optimizer, (torch.optim.Optimizer, type(None)))
        if any(owner.accountant is not self.accountant for owner in private_optimizers(module)):
            raise ValueError(
                "module was made private by another engine, which accounts for its steps: save and "
                "load its checkpoints with that engine, or make another module private with this "
                "one"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the data set, the shuffler and the tickets out of copies and pickles."""
        return {**self.__dict__, "dataset": None, "shuffler": None, "tickets": ()}


def _read(path: Any, options: dict[str, Any], allow_pickle: bool) -> dict[str, Any]:
    """Reads a checkpoint from a file, without running code of the file."""
    options = dict(instance_of("torch_load_kwargs", options, (dict,)))
    weights_only = options.pop("weights_only", not allow_pickle)
    if bool(weights_only) == allow_pickle or ("pickle_module" in options and not allow_pickle):
        raise ValueError(
            f"torch_load_kwargs must leave it to allow_pickle={allow_pickle} whether the file may "
            "run code: leave out weights_only and pickle_module, or pass allow_pickle=True if you "
            "trust the author of the file"
        )
    if isinstance(path, str | os.PathLike) and not os.path.exists(path):
        words = "no such file (path must be a checkpoint that engine.save_checkpoint has written)"
        raise FileNotFoundError(errno.ENOENT, words, os.fspath(path))
    by_name = hasattr(path, "read") or bool(options.get("mmap"))
    with contextlib.nullcontext(path) if by_name else open(path, "rb") as file:
        try:
            saved = torch.load(file, **options, weights_only=not allow_pickle)
        except Exception as error:  # a damaged file may raise any error
            *_, reason = str(error).split("WeightsUnpickler error:")
            raise ValueError(
                f"path must be a checkpoint that engine.save_checkpoint has written, got {path!r}, "
                f"which PyTorch cannot read as tensors and plain values ({type(error).__name__}: "
                f"{reason.strip().partition(chr(10))[0]}): load an earlier one if it is damaged; "
                "if it holds other objects and you trust its author, pass allow_pickle=True, which "
                "lets it run any code"
            ) from error
    parts = saved if isinstance(saved, dict) else {}
    if missing := [key for key in (_WEIGHTS, _ROUNDS) if key not in parts]:
        raise ValueError(
            f"path={path!r} is a checkpoint with no {' and no '.join(missing)}: load one that "
            "engine.save_checkpoint has written (module.load_state_dict loads weights alone, "
            "without any accounting)"
        )
    return parts


def _account_facts(
    saved: dict[str, Any],
) -> tuple[dict[str, int], int, tuple[str, ...], tuple[str, ...]]:
    """Returns a checkpoint's runs, for marks, and its ``rewound``, ``predictable``, ``unchecked``.

    Raises:
        ValueError: If these are malformed.
    """
    if _ACCOUNT not in saved:
        return {}, 0, (), ("stock_checkpoint",)
    facts = instance_of(_ACCOUNT, saved[_ACCOUNT], (dict,))
    return (
        instance_of("runs", facts.get("runs"), (dict,)),
        integer("rewound", facts.get("rewound"), minimum=0),
        names_in("predictable", facts.get("predictable")),
        names_in("unchecked", facts.get("unchecked")),
    )


def warn_on_unaccounted_weights(network: nn.Module) -> None:
    """Marks the state dicts of a private network, and warns of weights without their account.

    Args:
        network: The network itself, not a wrapper.
    """
    if _mark not in network._state_dict_hooks.values():
        network.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]
        network.register_load_state_dict_pre_hook(_warn_before_load)  # type: ignore[no-untyped-call]


def _accounted(network: nn.Module) -> dict[str, int] | None:
    """Returns how many rounds a private network's account holds, by run; None without one."""
    owner = vars(network).get(OWNER)  # which a copy of the network does not have
    if owner is None:
        return None
    accountant = owner.accountant
    rounds = sum(steps for *_, steps in accountant.history)
    # After a fork both processes go on from the same rounds, and release different ones.
    return {**accountant.loaded_runs, f"{accountant.run_name}-{os.getpid()}": rounds}


def _mark(network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Writes the accounted rounds into the metadata of a state dict."""
    if (accounted := _accounted(network)) is not None:
        metadata[_MARK] = accounted


def _warn_before_load(
    network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Warns of a state dict without a mark, or with the mark of rounds that are not accounted.

    Raises:
        ValueError: If it has no parameter of the network, which PyTorch ignores with strict=False.
    """
    names = [prefix + name for name, _ in network.named_parameters()]
    if names and state.keys().isdisjoint(names):  # PyTorch passes on only keys with the prefix
        raise ValueError(
            f"state_dict has none of the network's parameters, such as {names[0]!r}: "
            "the module that make_private returned writes '_module.' before each name, and the "
            "network itself does not; load a plain network's state_dict by "
            "model._module.load_state_dict(...)"
        )
    accounted, mark = _accounted(network), metadata.get(_MARK)
    if accounted is None:
        return
    if not isinstance(mark, dict) or any(
        rounds > accounted.get(name, -1) for name, rounds in mark.items()
    ):
        warnings.warn(
            f"{WITHOUT_ACCOUNT}: if they come from a private run, or have seen private records "
            "otherwise, they have their own privacy loss, and no epsilon of this engine covers it. "
            "engine.load_checkpoint(...) loads weights and account together; load weights of "
            "public data before make_private",
            PrivacyAssumptionWarning,
            stacklevel=2,
        )
