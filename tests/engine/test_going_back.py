"""No checkpoint, and nothing else that is loaded, makes an engine forget what it released."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict

import opacus
import pytest
import torch
from helpers.toy import make_toy, run_epoch, way_of
from opacus.utils.batch_memory_manager import BatchMemoryManager

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

OURS, OPACUS = ("shuffled_checkin", "shuffle_gauss"), ("rdp", "prv", "gdp")
every_accountant = pytest.mark.parametrize("name", OURS + OPACUS)
STEPS = 4  # of an epoch
pytestmark = pytest.mark.filterwarnings("ignore:GDP accounting")
stays = pytest.mark.filterwarnings("ignore:the checkpoint holds")


class Run:
    """A small private run."""

    def __init__(self, name: str, *, grad_sample_mode: str = "hooks", **toy) -> None:
        self.engine = PrivacyEngine(accountant=name)
        keywords = {} if name in OPACUS else way_of(name)
        made = self.engine.make_private(
            **make_toy(**toy), noise_multiplier=2.0, grad_sample_mode=grad_sample_mode, **keywords
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) > 3 else torch.nn.CrossEntropyLoss()

    def train(self, epochs: int = 1) -> Run:
        for _ in range(epochs):
            run_epoch(self.model, self.optimizer, self.loader, self.criterion)
        return self

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        self.engine.save_checkpoint(path=file, module=self.model, optimizer=self.optimizer)
        return file

    def load(self, file: io.BytesIO, **keywords) -> Run:
        file.seek(0)
        self.engine.load_checkpoint(
            path=file, module=self.model, optimizer=self.optimizer, **keywords
        )
        return self

    @property
    def rounds(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)


@every_accountant
def test_going_back_to_an_earlier_checkpoint_keeps_the_rounds_since(name):
    run = Run(name).train(2)
    weights, file = copy.deepcopy(run.model.state_dict()), run.saved()
    spent = run.train(1).engine.get_epsilon(1e-5)
    with pytest.warns(UserWarning, match=f"{STEPS} more, .* stay in the account"):
        run.load(file)
    assert all(torch.equal(weights[key], value) for key, value in run.model.state_dict().items())
    assert (run.rounds, run.engine.get_epsilon(1e-5)) == (3 * STEPS, spent)
    assert run.train(1).rounds == 4 * STEPS
    last = run.saved()
    assert Run(name).load(last).rounds == 4 * STEPS
    with pytest.warns(UserWarning, match="stay in the account"):
        assert run.load(file).rounds == 4 * STEPS


def refuses(run: Run, file: io.BytesIO) -> None:
    """Whether a checkpoint of another run is refused, with everything as before."""
    before, weights = (
        copy.deepcopy(run.engine.accountant.history),
        copy.deepcopy(run.model.state_dict()),
    )
    spent = run.engine.get_epsilon(1e-5)
    with pytest.raises(
        ValueError,
        match=f"of another run than the {run.rounds} rounds that ran here.*into a new engine",
    ):
        run.load(file)
    assert (run.engine.accountant.history, run.engine.get_epsilon(1e-5)) == (before, spent)
    assert all(torch.equal(weights[key], value) for key, value in run.model.state_dict().items())


@stays
@every_accountant
def test_of_two_accounts_of_one_run_the_longer_one_holds(name):
    run = Run(name).train(1)
    first = run.saved()
    later = Run(name).load(first).train(1)  # a process that goes on from there
    assert run.load(later.saved()).rounds == 2 * STEPS
    assert run.load(first).load(first).load(later.saved()).rounds == 2 * STEPS
    assert run.train(1).load(first).rounds == 3 * STEPS
    assert later.load(run.saved()).train(1).rounds == 4 * STEPS
    assert run.load(later.saved()).rounds == 4 * STEPS


@stays
@every_accountant
def test_runs_that_are_others_or_have_parted_are_refused(name):
    run, other = Run(name).train(1), Run(name).train(1)  # equal numbers are not equal rounds
    refuses(run, other.saved())
    first = run.saved()
    one, two = (Run(name).load(first).train(1) for _ in range(2))  # one checkpoint, loaded twice
    refuses(one, two.saved())
    refuses(run.train(1), one.saved())
    refuses(two, run.saved())
    assert one.load(first).rounds == 2 * STEPS
    with pytest.warns(PrivacyAssumptionWarning, match=f"{STEPS} rounds that ran are left out"):
        one.load(two.saved(), allow_rewind=True).engine.get_epsilon(1e-5)
    assert Run(name).load(two.saved()).rounds == 2 * STEPS


@stays
@every_accountant
def test_what_goes_on_after_it_was_taken_back_is_another_end_of_the_run(name):
    run = Run(name).train(1)
    first, longer = run.saved(), run.train(1).saved()
    run.load(first, allow_rewind=True).train(1)
    assert run.rounds == 2 * STEPS
    with pytest.raises(
        ValueError, match="has parted from them"
    ):  # of as many rounds, which are others
        run.load(longer)
    again = Run(name).load(first, allow_rewind=True).load(longer)  # nothing is left out of it
    assert again.rounds == 2 * STEPS
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        again.engine.get_epsilon(1e-5)


@pytest.mark.parametrize("name", OPACUS)
def test_a_history_that_was_shortened_and_grew_as_long_again_is_told_of(name):
    """It was looked at only when asked for: by then it was as long as before."""
    run = Run(name).train(1)
    state = copy.deepcopy(run.engine.accountant.state_dict())
    run.train(1).engine.accountant.load_state_dict(state)
    run.train(2)
    assert run.rounds == 3 * STEPS
    with pytest.warns(PrivacyAssumptionWarning, match=f"{2 * STEPS} rounds that ran are left out"):
        run.engine.get_epsilon(1e-5)


@every_accountant
def test_an_engine_that_ran_nothing_holds_what_the_checkpoint_holds(name):
    run = Run(name).train(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        warnings.filterwarnings("error", message="the checkpoint holds")
        again = Run(name).load(run.saved())
        assert again.load(run.saved()).engine.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5)
    assert again.engine.accountant.history == run.engine.accountant.history
    assert again.engine.accountant.state_dict() == run.engine.accountant.state_dict()


@stays
@every_accountant
def test_a_rewound_account_says_so_for_ever(name):
    run = Run(name).train(1)
    file = run.saved()
    run.train(1).load(file, allow_rewind=True)
    again = Run(name).load(run.train(1).saved())
    for each in (run, again):
        assert each.rounds == 2 * STEPS
        with pytest.warns(PrivacyAssumptionWarning, match=f"{STEPS} rounds that ran are left out"):
            each.engine.get_epsilon(1e-5)
        if name in OURS:
            report = each.engine.privacy_report(1e-5)
            assert report.to_dict()["rewound"] == STEPS
            for text in (" ".join(str(report).split()), report.statement()):
                assert f"{STEPS} rounds that ran are left out of this account" in text
    with pytest.raises(ValueError, match="allow_rewind must be"):
        run.load(file, allow_rewind="yes")


@stays
@pytest.mark.parametrize("name", OURS)
def test_an_accountant_alone_never_forgets_either(name):
    accountant = Run(name).train(1).engine.accountant
    state = accountant.state_dict()
    step = {"noise_multiplier": accountant.history[0][0], "sample_rate": accountant.history[0][1]}
    accountant.step(**step)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(accountant)))
    accountant.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert len(accountant) == STEPS + 1
    for each in (accountant, copied):
        each.step(**step)
    with pytest.raises(
        ValueError, match="has parted from them"
    ):  # both have gone on from the same rounds
        accountant.load_state_dict(copied.state_dict())
    for bare in (
        dict(state),
        OrderedDict(state),
    ):  # which says nothing of its origins: it may be anyone's
        with pytest.raises(ValueError, match=r"has lost its _metadata.*copy\.deepcopy"):
            accountant.load_state_dict(bare)
    assert len(accountant) == STEPS + 2


@pytest.mark.parametrize("name", OURS)
def test_a_history_that_is_set_in_the_place_of_rounds_that_ran_is_told_of(name):
    run = Run(name).train(1)
    for accountant in (run.engine.accountant, Run(name).load(run.saved()).engine.accountant):
        before = list(accountant.history)
        with pytest.raises(ValueError, match="triples"):
            accountant.history = [(2.0, 0.25)]
        assert (accountant.history, accountant.rewound) == (before, 0)
        accountant.history = [(*before[0][:2], 1)]
        with pytest.warns(PrivacyAssumptionWarning, match=f"{STEPS} rounds that ran are left out"):
            accountant.get_epsilon(1e-5)
    fresh = Run(name).engine.accountant
    for steps in (1, 2):  # as Opacus's calibration does
        fresh.history = [(*before[0][:2], steps)]
    assert fresh.rewound == 0


@pytest.mark.parametrize("name", [*OURS, *OPACUS])
@pytest.mark.parametrize("trained", [True, False])
def test_no_accountant_takes_the_place_of_the_one_that_steps_are_recorded_by(name, trained):
    run = Run(name)
    if trained:
        run.train(1)
    own = run.engine.accountant
    for other in (copy.deepcopy(own), opacus.accountants.create_accountant("rdp"), None):
        with pytest.raises(
            ValueError, match=r"engine\.accountant cannot be replaced after make_private, got a "
        ):
            run.engine.accountant = other
    run.engine.accountant = own
    assert run.train(1).engine.accountant is own
    assert run.rounds == (1 + trained) * STEPS


@pytest.mark.parametrize("name", OPACUS)
def test_a_checkpoint_of_opacus_itself_is_another_run_unless_nothing_ran(name):
    stock = opacus.PrivacyEngine(accountant=name)
    model, optimizer, loader = stock.make_private(**make_toy(), noise_multiplier=2.0)
    run_epoch(model, optimizer, loader)
    file = io.BytesIO()
    stock.save_checkpoint(path=file, module=model, optimizer=optimizer)
    run = Run(name).load(file).load(file)
    assert run.engine.accountant.history == stock.accountant.history
    assert run.engine.accountant.history[0][2] == STEPS
    refuses(Run(name).train(1), file)


@pytest.mark.parametrize("name", OPACUS)
def test_what_opacus_own_accountant_loads_by_itself_is_not_forgotten_in_silence(name):
    run = Run(name).train(1)
    state = run.engine.accountant.state_dict()
    run.train(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        run.engine.get_epsilon(1e-5)
    run.train(1).engine.accountant.load_state_dict(state)
    for _ in range(2):
        with pytest.warns(PrivacyAssumptionWarning, match="rounds that ran are left out"):
            run.engine.get_epsilon(1e-5)
        run.train(1)
    assert Run(name).load(run.saved()).rounds == run.rounds


def test_a_step_that_gdp_refuses_leaves_its_history_as_it_was():
    run = Run("gdp").train(1)
    spent, run.optimizer.noise_multiplier = run.engine.get_epsilon(1e-5), 1.0
    with pytest.raises(ValueError, match="have to stay constant"):
        run.train(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        assert (run.rounds, run.engine.get_epsilon(1e-5)) == (STEPS, spent)


@stays
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"grad_sample_mode": "ghost"}, {"grad_sample_mode": "ew"}], ids=str
)
@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_a_load_in_the_middle_of_a_batch_forgets_its_gradients(name, options, with_optimizer):
    run = Run(name, records=240, batch_size=60, **options)
    run.train(1)
    file = run.saved()
    batches = iter(run.loader)
    for step in range(2):  # the backward pass before the load, and after it
        x, y = next(batches)
        run.optimizer.zero_grad()
        loss = run.criterion(run.model(x), y)
        if not step:
            loss.backward()
        file.seek(0)
        run.engine.load_checkpoint(
            path=file, module=run.model, optimizer=run.optimizer if with_optimizer else None
        )
        loaded = [each.detach().clone() for each in run.model.parameters()]
        assert all(each.grad is None for each in run.model.parameters())
        if step:
            with pytest.raises(
                ValueError, match=r"before the last one|no gradient per record can be had"
            ):
                loss.backward()
        with pytest.raises(ValueError, match=r"no fresh batch.* checkpoint was loaded or"):
            run.optimizer.step()
        assert all(map(torch.equal, loaded, run.model.parameters()))
        assert run.rounds == STEPS
    x, y = next(batches)
    run.optimizer.zero_grad()
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    assert run.rounds == STEPS + 1


@stays
def test_a_load_in_the_middle_of_a_split_batch_forgets_its_sum():
    run = Run("shuffled_checkin", records=240, batch_size=60)
    file = run.train(1).saved()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=8, optimizer=run.optimizer
    ) as loader:
        for number, (x, y) in enumerate(loader):
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            if number == 2:
                run.load(file)
                assert all(each.summed_grad is None for each in run.model.parameters())
                break
            run.optimizer.step()
    assert run.optimizer.num_records == 0
    assert run.train(1).rounds == 2 * STEPS


@pytest.mark.parametrize("name", ["rdp", "shuffled_checkin"])
def test_an_engine_keeps_no_weights_whose_steps_another_one_accounts_for(name):
    run, other = Run(name).train(1), PrivacyEngine(accountant=name)
    file, written = run.saved(), io.BytesIO()
    before = copy.deepcopy(run.model.state_dict())
    for module in (run.model, run.model._module):
        with pytest.raises(ValueError, match="module was made private by another engine"):
            other.save_checkpoint(path=written, module=module)
        file.seek(0)
        with pytest.raises(ValueError, match="module was made private by another engine"):
            other.load_checkpoint(path=file, module=module)
    assert written.getvalue() == b""
    assert all(torch.equal(each, before[key]) for key, each in run.model.state_dict().items())
    assert len(other.accountant) == 0
