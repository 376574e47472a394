"""A release cannot be undone: no load, fork, kill or interrupt removes it from the account."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import multiprocessing
import os
import threading
import warnings

import pytest
import torch
from helpers import toy as small_runs
from helpers.private_runs import Run, private, same

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:GDP accounting", "ignore:the checkpoint holds"),
    pytest.mark.filterwarnings("ignore:Secure RNG"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
]
DELTA = 1e-5
STEPS = 4  # of an epoch
trains_in_a_fork = pytest.mark.skipif(
    small_runs.DEVICE.type != "cpu", reason="a forked process cannot use its parent's GPU"
)
OPACUS_OWN = ["gdp", *(pytest.param(name, marks=pytest.mark.zoo) for name in ("rdp", "prv"))]
every_accountant = pytest.mark.parametrize("name", ["shuffled_checkin", *OPACUS_OWN])
both = pytest.mark.parametrize("name", ["gdp", "shuffled_checkin"])


def silent(run):
    """The epsilon, without a warning that rounds were replaced."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        return run.engine.get_epsilon(DELTA)


def mentions(run, rounds):
    """Whether ε and every text of a report mention how many rounds were replaced."""
    said = f"{rounds} accounted rounds were replaced in this account"
    with pytest.warns(PrivacyAssumptionWarning, match=said):
        run.engine.get_epsilon(DELTA)
    report = run.engine.privacy_report(DELTA)
    texts = " ".join(str(report).split()), report.statement()
    return report.to_dict()["rewound"] == rounds and all(said in text for text in texts)


# ---- one rule: a checkpoint is loaded into a new engine, or with allow_rewind ----------------


@every_accountant
def test_an_engine_with_rounds_refuses_every_checkpoint_and_a_new_one_holds_its_rounds(name):
    run, another = private(name).train(), private(name).train()
    earlier = run.saved()
    later = run.train().saved()
    weights, spent = run.weights(), silent(run)
    for file in (earlier, later, another.saved()):
        with pytest.raises(ValueError, match=f"{2 * STEPS} rounds are already accounted here"):
            run.load(file)
    assert same(run.weights(), weights)
    again = private(name).load(later)
    assert again.engine.accountant.state_dict() == run.engine.accountant.state_dict()
    assert silent(again) == silent(run) == spent > 0


@every_accountant
def test_a_rewound_account_says_so_for_ever(name):
    run = private(name).train()
    first, another = run.saved(), private(name).train().train().saved()
    run.train()
    with pytest.raises(ValueError, match="allow_rewind must be"):
        run.load(first, allow_rewind="yes")
    run.load(first, allow_rewind=True)
    assert run.accounted == STEPS
    for rewound in (run.train(), private(name).load(run.saved())):
        assert rewound.accounted == 2 * STEPS
        assert mentions(rewound, 2 * STEPS)
    run.load(another, allow_rewind=True)  # as many rounds, of which none ran here
    assert mentions(run, 4 * STEPS)
    assert silent(private(name).load(first, allow_rewind=True)) > 0  # nothing is replaced


@both
def test_an_engine_keeps_no_weights_whose_steps_another_one_accounts_for(name):
    run, other, written = private(name).train(), PrivacyEngine(accountant=name), io.BytesIO()
    before, file = run.weights(), run.saved()
    for module in (run.model, run.network):
        for work, path in ((other.save_checkpoint, written), (other.load_checkpoint, file)):
            with pytest.raises(ValueError, match="module was made private by another engine"):
                work(path=path, module=module)
    assert written.getvalue() == b""
    assert same(run.weights(), before)


# ---- in the middle of a batch ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), [("rdp", "hooks"), ("shuffled_checkin", "ghost")])
def test_a_load_in_the_middle_of_a_batch_forgets_its_gradients(name, mode):
    run = private(name, mode, records=240, batch_size=60).train()
    file, batches = run.saved(), iter(run.loader)
    for after in (False, True):  # the backward pass before the load, and after it
        x, y = next(batches)
        run.optimizer.zero_grad()
        loss = run.criterion(run.model(x), y)
        if not after:
            loss.backward()
        loaded = run.load(file, allow_rewind=True).weights()
        assert all(parameter.grad is None for parameter in run.network.parameters())
        if after:
            with pytest.raises(ValueError, match=r"before the last one|no gradients per record"):
                loss.backward()
        with pytest.raises(ValueError, match=r"no fresh batch.* checkpoint was loaded or"):
            run.optimizer.step()
        assert same(run.weights(), loaded)
        assert run.accounted == STEPS
    with run.split(8) as loader:
        run.train(itertools.islice(loader, 3))
        run.load(file, allow_rewind=True)
    assert all(parameter.summed_grad is None for parameter in run.network.parameters())
    assert run.train().accounted == 2 * STEPS


# ---- forked, killed and interrupted ---------------------------------------------------------


def counting(name, path):
    """A run whose weights know how many releases they contain."""
    run = private(name)
    run.network.register_buffer("releases", torch.zeros((), dtype=torch.int64))
    run.plain.register_step_post_hook(lambda *_: run.network.releases.add_(1))
    run.save = functools.partial(
        run.engine.save_checkpoint, path=path, module=run.model, optimizer=run.optimizer
    )
    return run


def forked(work):
    """The exit status of a forked child that does this: 0 if it came to the end."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode


@both
def test_a_checkpoint_of_any_moment_of_a_step_accounts_for_every_release_in_its_weights(
    name, tmp_path
):
    """So no process that is killed leaves a release unaccounted; a load accounts first, too."""
    run, accounted = counting(name, tmp_path / "run.pt"), []
    resumed = counting(name, None)
    resumed.model.register_load_state_dict_post_hook(lambda *_: accounted.append(resumed.accounted))

    def save_and_load(*_):
        run.save()
        resumed.load(tmp_path / "run.pt", allow_rewind=True)
        assert accounted[-1] == resumed.accounted >= int(resumed.network.releases)

    run.optimizer.attach_step_hook(save_and_load)
    run.plain.register_step_pre_hook(save_and_load)
    run.plain.register_step_post_hook(save_and_load)
    for batch in run.loader:
        run.optimizer.zero_grad()
        run.backward(batch)
        save_and_load()
        run.optimizer.step()
    assert len(accounted) == STEPS * 4


@both
def test_a_checkpoint_is_not_kept_if_training_went_on_while_it_was_written(name, tmp_path):
    path = tmp_path / "run.pt"
    run = counting(name, path).train()
    run.save()
    before = path.read_bytes()

    class Late:
        def __reduce__(self):  # while it is pickled
            thread = threading.Thread(target=run.train)
            thread.start()
            thread.join()
            return int, ()

    with pytest.raises(ValueError, match="step was taken while the checkpoint was written"):
        run.save(checkpoint_dict={"mine": Late()})
    assert path.read_bytes() == before
    run.save()
    assert counting(name, None).load(path).accounted == 8


@trains_in_a_fork
def test_a_fork_inside_of_an_epoch_leaves_its_draws_to_the_parent():
    """By random allocation all batches of an epoch are drawn at its beginning."""
    run = Run("random_allocation")
    batches = iter(run.loader)
    run.step(next(batches))

    def go_on():
        with pytest.raises(ValueError, match="drawn before the process forked"):
            run.step(next(batches))
        run.train()

    assert forked(go_on) == 0
    run.train(batches)
    assert run.accounted == 4


@trains_in_a_fork
@both
def test_forked_processes_draw_their_own_noise_and_own_batches(name, tmp_path):
    run = private(name).train()
    run.optimizer.zero_grad()
    run.backward(next(iter(run.loader)))

    def train(path):
        with pytest.raises(ValueError, match="or the process forked"):  # the batch is the parent's
            run.optimizer.step()
        run.train()
        run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)

    paths = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for path in paths:
        assert forked(functools.partial(train, path)) == 0
    run.optimizer.step()
    assert run.accounted == STEPS + 1
    one, two = (private(name).load(path) for path in paths)
    assert one.accounted == two.accounted == 2 * STEPS
    weights = [other.weights()["0.weight"] for other in (run.train(), one, two)]
    assert not any(itertools.starmap(torch.equal, itertools.combinations(weights, 2)))


# ---- weights without their account ----------------------------------------------------------


runs_of_networks = pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("shuffled_checkin", "ghost", {"shuffle_weights": True}),
        ("shuffled_checkin", "no wrapper", {}),
        ("gdp", "hooks", {}),
    ],
)


@runs_of_networks
@pytest.mark.filterwarnings("ignore:weights were loaded into")
def test_a_state_dict_without_any_key_of_the_private_network_is_refused(name, mode, options):
    """PyTorch does not report it with strict=False."""
    run = private(name, mode, **options)
    plain = run.network.state_dict()
    wrapped = torch.nn.ModuleDict({"_module": run.network}).state_dict()
    wrong, right = (plain, wrapped) if mode != "no wrapper" else (wrapped, plain)
    before = run.weights()
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"writes '_module\.' before each name"):
            run.model.load_state_dict({key: value + 1 for key, value in wrong.items()}, strict)
    assert same(before, run.weights())
    run.model.load_state_dict(dict([*right.items()][:1]), strict=False)  # a part of them


@runs_of_networks
def test_weights_without_their_account_raise_a_warning_and_accounted_ones_do_not(
    name, mode, options
):
    run, again, theirs = (private(name, mode, **options) for _ in range(3))
    without = r"without their account.*own privacy loss.*engine\.load_checkpoint"
    state = theirs.train().model.state_dict()
    for foreign in (state, dict(state), torch.load(theirs.saved())["module_state_dict"]):
        with pytest.warns(PrivacyAssumptionWarning, match=without):
            again.model.load_state_dict(foreign)
    first, file = copy.deepcopy(run.train().model.state_dict()), run.saved()
    later = run.train().model.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weights were loaded into")
        run.model.load_state_dict(first)
        again.load(file)
        again.model.load_state_dict(first)
    with pytest.warns(PrivacyAssumptionWarning, match=without):
        again.model.load_state_dict(later)  # of rounds that this account does not hold
