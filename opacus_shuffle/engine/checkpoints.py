"""Saves and loads private runs: whole or not at all, and never forgetting what was released.

Weights and the account of what they cost stay together. So weights that are loaded into a private
network without their account are told of: what ``state_dict`` of a private network returns says in
its metadata which rounds had run by then, under the random names by which accounts tell them apart.
A run's own weights go back without a word, and all others are asked for their account.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import opacus
import torch
from opacus.accountants import IAccountant
from torch import nn

from opacus_shuffle.accountants import PrivacyAssumptionWarning, ShuffleAccountant
from opacus_shuffle.accountants.lineage import (
    Lineage,
    append_rounds,
    first_rounds,
    number_of_rounds,
    rewound_sentence,
    warn_of_kept_rounds,
)
from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.plain_values import fingerprint, plain
from opacus_shuffle.core.validation import boolean, finite_number, instance_of, integer
from opacus_shuffle.engine.raw_gradients import private_optimizers
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.running import rolled_back_if_refused

Entries = list[tuple[tuple[float, float], int]]

_MARK = "opacus_shuffle"
_SHUFFLER, _ACCOUNT = "opacus_shuffle", "opacus_shuffle_account"
_WEIGHTS, _ROUNDS = "module_state_dict", "privacy_accountant_state_dict"
_STATES = ("optimizer_state_dict", "noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")
_TOLD = ("lineage", "predictable", "unchecked")
STOCK = (
    "a checkpoint of Opacus's own engine, which says neither how its batches were drawn nor "
    "whether it was changed"
)
PICKLED = "a file read with allow_pickle=True, which could run code, and so change anything"

_ACCOUNTS: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = weakref.WeakKeyDictionary()
"""The account of each private network. Copies take the hooks along, and are not in it."""


class CheckpointMixin(opacus.PrivacyEngine):
    """Saves and loads what a run needs to go on.

    Attributes:
        shuffler: Permutes the weights of the latest ``make_private``; None without
            ``shuffle_weights``.
        predictable: What was passed to such runs that lets others draw their randomness again.
        unchecked: What an account by one of them takes on trust, as
            ``ShuffleAccountant.unchecked``.
        tickets: Weak references to the tickets of runs whose batches have secret sizes.
        opacus_lineage: Follows the history of one of Opacus's own accountants.
    """

    shuffler: WeightShuffler | None = None
    predictable: tuple[str, ...] = ()  # our own accountants have these two
    unchecked: tuple[str, ...] = ()
    tickets: tuple[Callable[[], Any], ...] = ()
    accountant: Any  # Opacus's, untyped
    opacus_lineage: OpacusLineage
    _loading: bool = False

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
        told = {
            "lineage": None if self._is_ours else self.opacus_lineage.state(self.accountant),
            "predictable": list(self.predictable),
            "unchecked": list(self.unchecked),
        }
        saved = plain(saved, foreign)
        saved[_ACCOUNT] = {**told, "digest": _digest(saved, told)}
        with replacing(path) as file:
            torch.save(saved, file, **(torch_save_kwargs or {}))
            if self.accountant.history != accounted:
                raise ValueError(
                    "a step was taken while the checkpoint was written, which its weights may "
                    "hold, and its accounting does not: save between steps, in the thread that "
                    "trains"
                )
        if foreign:
            warnings.warn(
                f"the checkpoint holds {', '.join(sorted(foreign))}, which load_checkpoint reads "
                "with allow_pickle=True alone: put tensors, numbers, strings, lists and "
                "dictionaries into it",
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

        What this engine has released is not forgotten by it.

        No code of the file runs: it is read by PyTorch's reader of tensors and plain values,
        whatever ``torch_load_kwargs`` says, and what needs more is refused. So is what was changed
        after :meth:`save_checkpoint` has written it, if the change does not write a new digest.

        An engine that has run nothing holds the checkpoint's accounting afterwards, as Opacus's
        does. One that has run holds the longer one of its account and the checkpoint's, if one is
        the beginning of the other: going back to an earlier checkpoint of this run leaves the
        rounds since in the account, because they were released, and a warning names them. The
        checkpoint of another run is refused, and so are one that has parted from this run and one
        of Opacus's own engine, which does not say which rounds it holds: load those into a new
        engine. Permutations of weights go on from where the saved run was. Gradients that wait for
        a step are forgotten: they belong to the weights of before.

        Args:
            path: As Opacus's.
            module: As Opacus's.
            optimizer: As Opacus's.
            noise_scheduler: As Opacus's.
            grad_clip_scheduler: As Opacus's.
            module_load_dict_kwargs: As Opacus's.
            torch_load_kwargs: As Opacus's, but for ``weights_only`` and ``pickle_module``, which
                ``allow_pickle`` is about.
            allow_rewind: Account for the checkpoint's rounds alone. That is right only if nobody
                ever saw anything of the others, be it weights, losses or predictions. Reports and
                :meth:`get_epsilon` say how many were left out.
            allow_pickle: Let the file run any code, as Opacus does: for one that holds other
                objects, from someone you trust. Reports say so from then on.

        Returns:
            As Opacus's.

        Raises:
            ValueError: If the file cannot be read, needs more than ``allow_pickle=False`` lets it
                do, misses a part, was changed, or is of another run than this engine accounts for;
                what PyTorch raises besides. Whatever it is: modules, optimizers, schedulers,
                accounting and shuffling are as before.
            FileNotFoundError: If there is no such file.
        """
        boolean("allow_rewind", allow_rewind)
        boolean("allow_pickle", allow_pickle)
        self._check_parts(path, module, optimizer)
        saved = _read(path, torch_load_kwargs or {}, allow_pickle)
        told, name = _told(saved)
        parts = dict(zip(_STATES, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True))
        self._loading = True
        try:
            with rolled_back_if_refused(module, *parts.values(), self.shuffler, self.accountant):
                rounds, followed = saved[_ROUNDS], self.opacus_lineage
                if self._is_ours:
                    accountant = copy.deepcopy(self.accountant)
                    accountant.load_state_dict(rounds, allow_rewind=allow_rewind)
                else:
                    accountant, followed = followed.loaded(
                        self.accountant, rounds, told["lineage"], name, allow_rewind
                    )
                if self.shuffler is not None and _SHUFFLER in saved:
                    self.shuffler.load_state_dict(saved[_SHUFFLER])
                # Before the weights, should this be interrupted.
                vars(self.accountant).update(vars(accountant))
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
        finally:
            self._loading = False
        self.opacus_lineage = followed
        self.predictable = tuple(dict.fromkeys((*self.predictable, *told["predictable"])))
        knows = self.accountant if self._is_ours else self
        unchecked = (*knows.unchecked, *told["unchecked"], *([PICKLED] if allow_pickle else []))
        knows.unchecked = tuple(dict.fromkeys(unchecked))
        return saved

    def _check_parts(self, path: Any, module: Any, optimizer: Any) -> None:
        """Refuses a bad path, module or optimizer, and a module of another engine."""
        if not (hasattr(path, "read") or hasattr(path, "write")):
            name = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
            if not name or "\0" in name or os.path.isdir(name):
                raise ValueError(
                    f"path must be the name of a file or an open one, got {path!r}: pass one such "
                    "as 'run.pt'"
                )
        instance_of("module", module, (nn.Module,))
        instance_of("optimizer", optimizer, (torch.optim.Optimizer, type(None)))
        if any(owner.accountant is not self.accountant for owner in private_optimizers(module)):
            raise ValueError(
                "module was made private by another engine, which accounts for its steps: save and "
                "load its checkpoints by that one, or make another module private by this engine"
            )

    @property
    def rewound(self) -> int:
        """How many rounds ran that the accountant, one of Opacus's own, no longer holds."""
        return self.opacus_lineage.rewound(self.accountant)

    def warn_if_rewound(self) -> None:
        """Warns if an accountant of Opacus's own no longer holds rounds that ran."""
        if left_out := self.rewound:
            warnings.warn(rewound_sentence(left_out), PrivacyAssumptionWarning, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the data set, the shuffler and the tickets out of copies and pickles."""
        return {**self.__dict__, "dataset": None, "shuffler": None, "tickets": ()}

    def known_lineage(self) -> Lineage | None:
        """Returns which rounds are accounted; None while a checkpoint is loaded."""
        if self._loading:
            return None
        return self.accountant.lineage if self._is_ours else self.opacus_lineage.lineage  # type: ignore[no-any-return]

    @property
    def _is_ours(self) -> bool:
        """Whether the accountant belongs to this package, not to Opacus."""
        return isinstance(self.accountant, ShuffleAccountant)


class OpacusLineage:
    """Follows the history of one of Opacus's accountants, for comparison with checkpoints.

    Attributes:
        lineage: Of which run the history is, as far as is known.
    """

    def __init__(self) -> None:
        self.lineage = Lineage()
        self._seen: Entries = []

    @contextlib.contextmanager
    def another_round(self, accountant: IAccountant) -> Iterator[None]:
        """Counts the round that is recorded in this block; an error restores the history.

        Opacus's accountants take the last entry out before they look whether they can put a longer
        one in.
        """
        if not _keeps_triples(accountant):
            yield
            return
        # Before it grows: a history that was shortened would be as long again after some rounds.
        self.follow(accountant)
        before = list(accountant.history)
        try:
            yield
        except BaseException:
            accountant.history = before
            raise
        self.follow(accountant)

    def follow(self, accountant: IAccountant) -> Entries:
        """Names the rounds that ran since the last call, and returns all that ran.

        What was set by hand, or loaded by the accountant itself, is another run's.

        Raises:
            ValueError: If what was set by hand is no history.
        """
        entries = _entries_of(accountant.history)
        if first_rounds(entries, number_of_rounds(self._seen)) != self._seen:
            self.lineage = self.lineage.rewound_to(Lineage())
        self.lineage.name_rounds(number_of_rounds(entries))
        self._seen = entries
        return entries

    def loaded(
        self, accountant: IAccountant, state: Any, told: Any, name: str, allow_rewind: bool
    ) -> tuple[IAccountant, OpacusLineage]:
        """Returns a copy of the accountant with a checkpoint loaded, and the lineage to go with it.

        Args:
            accountant: What is loaded into.
            state: The accountant's state in the checkpoint.
            told: What :meth:`state` wrote beside it; None in a checkpoint of Opacus's own engine.
            name: A name for such a checkpoint's content.
            allow_rewind: Whether the state's rounds take the place of those that ran.

        Raises:
            ValueError: If the state is none of this accountant, of another run, malformed, or not
                as it was saved.
        """
        trial, after = copy.deepcopy(accountant), copy.deepcopy(self)
        trial.load_state_dict(copy.deepcopy(state))
        if not _keeps_triples(accountant):  # whose rounds nobody here can read
            if len(accountant) and not allow_rewind:
                raise ValueError(
                    f"accountant {accountant.mechanism()!r} has run {len(accountant)} rounds that "
                    "a load would drop: load the checkpoint into a new engine, or pass "
                    "allow_rewind=True"
                )
            return trial, after
        saved = _entries_of(trial.history)
        rounds = number_of_rounds(saved)
        lineage = Lineage({name: rounds}, {name: rounds}) if rounds else Lineage()
        if told is not None:
            lineage = Lineage.from_state(told, saved)
        ran = after.follow(accountant)
        if allow_rewind or not ran:
            after.lineage, after._seen = after.lineage.rewound_to(lineage), saved
        else:
            after.lineage, after._seen = after.lineage.reconcile(ran, lineage, saved)
            trial.history = [(*entry, steps) for entry, steps in after._seen]
            warn_of_kept_rounds(number_of_rounds(after._seen) - rounds, rounds)
        return trial, after

    def rewound(self, accountant: IAccountant) -> int:
        """Returns how many rounds ran that the accountant no longer holds."""
        if _keeps_triples(accountant):
            self.follow(accountant)
        return self.lineage.rewound

    def state(self, accountant: IAccountant) -> dict[str, Any] | None:
        """Returns the lineage as plain values, for a checkpoint; None for other accountants."""
        if not _keeps_triples(accountant):
            return None
        entries = self.follow(accountant)
        return self.lineage.as_state(entries)


def _keeps_triples(accountant: IAccountant) -> bool:
    """Tells whether an accountant keeps its history as Opacus's own do."""
    return type(accountant).load_state_dict is IAccountant.load_state_dict


def _entries_of(history: Any) -> Entries:
    """Reads Opacus's (noise, rate, steps) triples as entries with their numbers of steps."""
    entries: Entries = []
    for triple in history if isinstance(history, list | tuple) else [history]:
        if not isinstance(triple, list | tuple) or len(triple) != 3:
            raise ValueError(
                f"history must hold (noise_multiplier, sample_rate, steps) triples, got {triple!r}"
            )
        noise, rate = (finite_number(f"{value!r} in history", value) for value in triple[:2])
        append_rounds(entries, (noise, rate), integer("steps in history", triple[2]))
    return entries


def _read(path: Any, options: dict[str, Any], allow_pickle: bool) -> dict[str, Any]:
    """Reads a checkpoint from a file, without running code of the file."""
    options = dict(instance_of("torch_load_kwargs", options, (dict,)))
    weights_only = options.pop("weights_only", not allow_pickle)
    if bool(weights_only) == allow_pickle or ("pickle_module" in options and not allow_pickle):
        raise ValueError(
            f"torch_load_kwargs must leave it to allow_pickle={allow_pickle} whether the file may "
            "run code: leave out weights_only and pickle_module, or pass allow_pickle=True if you "
            "trust whoever has written the file"
        )
    if isinstance(path, str | os.PathLike) and not os.path.exists(path):
        words = "no such file (path must be a checkpoint that engine.save_checkpoint has written)"
        raise FileNotFoundError(errno.ENOENT, words, os.fspath(path))
    by_name = hasattr(path, "read") or bool(options.get("mmap"))
    with contextlib.nullcontext(path) if by_name else open(path, "rb") as file:
        try:
            saved = torch.load(file, **options, weights_only=not allow_pickle)
        except Exception as error:  # there is nothing that a damaged file does not raise
            *_, reason = str(error).split("WeightsUnpickler error:")
            raise ValueError(
                f"path must be a checkpoint that engine.save_checkpoint has written, got {path!r}, "
                f"which PyTorch cannot read as tensors and plain values ({type(error).__name__}: "
                f"{reason.strip().partition(chr(10))[0]}): load an earlier one if it is damaged; "
                "if it holds other objects and you trust whoever has written it, pass "
                "allow_pickle=True, which lets it run any code"
            ) from error
    parts = saved if isinstance(saved, dict) else {}
    if missing := [key for key in (_WEIGHTS, _ROUNDS) if key not in parts]:
        raise ValueError(
            f"path={path!r} is a checkpoint with no {' and no '.join(missing)}: load one that "
            "engine.save_checkpoint has written (weights alone go by module.load_state_dict, and "
            "bring no accounting with them)"
        )
    return parts


def _digest(saved: dict[str, Any], told: dict[str, Any]) -> str:
    """Returns a digest of a checkpoint's parts, by which a change of the file is seen."""
    keys = [key for key in (_WEIGHTS, _ROUNDS, _SHUFFLER, *_STATES) if key in saved]
    return fingerprint([(key, saved[key]) for key in keys], told)


def _told(saved: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns what a checkpoint says of its account, and a name for its content.

    Raises:
        ValueError: If it is not as it was saved.
    """
    told = saved.get(_ACCOUNT)
    if told is None and _SHUFFLER not in saved:  # nothing of ours
        name = fingerprint(saved[_WEIGHTS], saved[_ROUNDS])
        return {"lineage": None, "predictable": [], "unchecked": [STOCK]}, name
    told = dict(told) if isinstance(told, dict) else {}
    digest = told.pop("digest", None)
    if told.keys() != set(_TOLD) or digest != _digest(saved, told):
        raise ValueError(
            "the checkpoint's weights, optimizer, privacy_accountant_state_dict and "
            "opacus_shuffle_account do not belong together: it was changed after it was saved; "
            "load it as it was (weights alone go by module.load_state_dict)"
        )
    return told, digest


def tell_of_weights_alone(network: nn.Module, account: Callable[[], Lineage | None]) -> None:
    """Has a network mark its state dicts, and warn of loaded weights that are not accounted.

    Args:
        network: The network itself, not a wrapper. A later account takes the place of an earlier
            one.
        account: A method that returns which rounds are accounted, or None where nothing is to be
            said.
    """
    if _mark not in network._state_dict_hooks.values():
        network.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]
        network.register_load_state_dict_pre_hook(_warn_before_load)  # type: ignore[no-untyped-call]
    _ACCOUNTS[network] = weakref.WeakMethod(account)  # type: ignore[arg-type]


def _lineage_of(network: nn.Module) -> Lineage | None:
    """Returns which rounds of a network are accounted; None if nobody accounts for it."""
    account = _ACCOUNTS[network]() if network in _ACCOUNTS else None
    return None if account is None else account()


def _mark(network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Writes the accounted rounds into the metadata of a state dict."""
    if (lineage := _lineage_of(network)) is not None:
        metadata[_MARK] = dict(lineage.held)


def _warn_before_load(
    network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Warns of a state dict without a mark, or with one of rounds that are not accounted.

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
    lineage, mark = _lineage_of(network), metadata.get(_MARK)
    if lineage is None:
        return
    known = isinstance(mark, dict) and all(
        lineage.seen.get(name, 0) >= rounds for name, rounds in mark.items()
    )
    if not known:
        warnings.warn(
            "weights were loaded into a private network without their account: if they come from a "
            "private run, or have seen private records otherwise, they have their own privacy "
            "loss, and no epsilon of this engine covers it. engine.load_checkpoint(...) loads "
            "weights and account together; load weights of public data before make_private",
            PrivacyAssumptionWarning,
            stacklevel=2,
        )
