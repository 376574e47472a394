"""The drop-in engine: what it accounts, what it refuses, what it leaves as it was."""

from __future__ import annotations

import copy
import io
import math

import opacus
import pytest
import torch
from helpers.toy import ONE_NOISE, make_toy, run_epoch, way_of
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine, ShuffleMixin, compute_epsilon
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.schemes.gaussian_reports import GaussianReports

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
NAMES = ONE_NOISE
every_accountant = pytest.mark.parametrize("name", NAMES)
# Who shuffles reports may have noise in each of them; shuffled_fw shuffles weights and has the
# server's noise alone.
every_shuffler_of_reports = pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "shuffled_fw"]
)
MOVING = 5 * 40 + 40 + 40 * 3
"""What shuffling moves of the toy network; the last bias stays."""


def numbers_of(name, *, records=24, batch=6):
    """The toy run, for an accountant without a model."""
    if name == "shuffle_gauss":
        return {"num_users": batch}
    return {"num_users": records, "sample_rate": batch / records} | (
        {"dimension": MOVING} if name == "shuffled_fw" else {}
    )


@every_accountant
@pytest.mark.parametrize("bound", ["published", "pair", "certified"])
def test_epsilon_after_training_is_that_of_the_plain_numbers(name, bound):
    engine = PrivacyEngine(accountant=name)
    model, optimizer, loader = engine.make_private(
        **make_toy(), noise_multiplier=2.0, **way_of(name)
    )
    for _ in range(3):
        run_epoch(model, optimizer, loader)
    numbers = numbers_of(name)
    if (name, bound) == (
        "shuffled_fw",
        "pair",
    ):  # which is about the places that this network's permutations reach
        numbers |= {"dimension": engine.accountant.planned.orbit}
    expected = compute_epsilon(
        name, noise_multiplier=2.0, steps=12, delta=1e-5, bound=bound, **numbers
    )
    if (name, bound) == (
        "shuffled_fw",
        "published",
    ):  # the bias that stays has the same noise and asks for more
        stays = compute_epsilon(
            name,
            noise_multiplier=2.0,
            steps=12,
            delta=1e-5,
            bound=bound,
            **numbers_of(name) | {"dimension": 1},
        )
        expected = max(expected, stays)
        # which is the Gaussian mechanism exactly, whose ε is enlarged by 1e-8
        assert engine.get_epsilon(1e-5, bound=bound) == pytest.approx(expected, rel=1e-7)
    else:
        assert engine.get_epsilon(1e-5, bound=bound) == expected > 0


@every_shuffler_of_reports
def test_without_local_noise_the_multiplier_is_that_of_the_sum(name):
    engines = [PrivacyEngine(accountant=name) for _ in range(2)]
    for engine, sigma, local in zip(engines, (2.0, 2.0 * math.sqrt(6)), (True, False), strict=True):
        model, optimizer, loader = engine.make_private(
            **make_toy(), noise_multiplier=sigma, local_noise=local
        )
        run_epoch(model, optimizer, loader)
    assert engines[0].get_epsilon(1e-5) == pytest.approx(engines[1].get_epsilon(1e-5), rel=1e-9)


WAYS = [
    (name, {"local_noise": local})
    for name in NAMES
    if name != "shuffled_fw"
    for local in (True, False)
]
WAYS += [("shuffled_fw", {"shuffle_weights": True}), ("shuffled_fw", {})]
CALIBRATED = {  # of all ways by all bounds, by default; the zoo's tests take the others
    ("shuffle_gauss", "published"): {"local_noise": True},
    ("shuffle_gauss", "certified"): {"local_noise": False},
    ("subsampled_shuffle", "published"): {"local_noise": True},
    ("shuffled_checkin", "published"): {"local_noise": True},
    ("shuffled_fw", "published"): {"shuffle_weights": True},
}


@pytest.mark.parametrize(
    ("name", "way", "bound"),
    [
        pytest.param(
            name, way, bound, marks=() if CALIBRATED.get((name, bound)) == way else pytest.mark.zoo
        )
        for name, way in WAYS
        for bound in ("published", "pair", "certified")
    ],
    ids=str,
)
def test_calibration_never_overshoots_and_is_close(name, way, bound):
    target = {"published": 30.0, "pair": 8.0, "certified": 8.0}[
        bound
    ]  # Theorems 2 and 3 have a floor
    toy = make_toy(records=93)
    toy["data_loader"] = DataLoader(toy["data_loader"].dataset, batch_size=1)
    engine = PrivacyEngine(accountant=name)
    model, optimizer, loader = engine.make_private_with_epsilon(
        **toy, target_epsilon=target, target_delta=1e-5, epochs=3, bound=bound, **way
    )
    for _ in range(3):
        run_epoch(model, optimizer, loader)
    assert len(engine.accountant) == 279
    spent = engine.get_epsilon(1e-5, bound=bound)
    assert spent <= target
    assert spent > target * (1 - 1e-4)
    assert engine.accountant.emulated is (way.get("local_noise") is False)


def test_a_second_make_private_cannot_change_the_meaning_of_the_first():
    engine = PrivacyEngine(accountant="shuffled_checkin")
    engine.make_private(**make_toy(), noise_multiplier=2.0, local_noise=False)
    for toy, local_noise in ((make_toy(), True), (make_toy(records=2400, batch_size=60), False)):
        with pytest.raises(ValueError, match="new PrivacyEngine"):
            engine.make_private(**toy, noise_multiplier=2.0, local_noise=local_noise)


def test_a_checkpoint_of_another_kind_of_noise_is_refused():
    local, summed = (PrivacyEngine(accountant="shuffled_checkin") for _ in range(2))
    model, optimizer, loader = local.make_private(
        **make_toy(), noise_multiplier=2.0, local_noise=True
    )
    run_epoch(model, optimizer, loader)
    file = io.BytesIO()
    local.save_checkpoint(path=file, module=model)
    file.seek(0)
    other, _, _ = summed.make_private(**make_toy(), noise_multiplier=2.0, local_noise=False)
    with pytest.raises(ValueError, match="emulated=False"):
        summed.load_checkpoint(path=file, module=other)
    assert summed.accountant.history == []


def test_calibrating_for_a_bound_that_is_not_proved_warns():
    with pytest.warns(PrivacyAssumptionWarning, match="certified"):
        PrivacyEngine(accountant="shuffle_gauss").make_private_with_epsilon(
            **make_toy(),
            target_epsilon=4.0,
            target_delta=1e-5,
            epochs=2,
            local_noise=True,
            bound="published",
        )


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("shuffle_gauss", {"noise_multiplier": 0.0}, "noise_multiplier"),
        ("shuffle_gauss", {"noise_multiplier": -1.0}, "noise_multiplier"),
        ("shuffle_gauss", {"noise_multiplier": math.nan}, "noise_multiplier"),
        ("shuffle_gauss", {"max_grad_norm": 0.0}, "max_grad_norm"),
        ("shuffle_gauss", {"max_grad_norm": math.inf}, "max_grad_norm"),
        ("shuffle_gauss", {"max_grad_norm": [1.0]}, "max_grad_norm"),
        ("shuffle_gauss", {"clipping": "per_layer"}, "max_grad_norm"),
        ("shuffle_gauss", {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]}, "4 norms"),
        ("shuffle_gauss", {"clipping": "adaptive"}, "clipping"),
        ("shuffle_gauss", {"localnoise": True}, "localnoise"),
        ("shuffle_gauss", {"noise_multiplier": "2.0"}, "noise_multiplier"),
        ("shuffle_gauss", {"max_grad_norm": "1"}, "max_grad_norm"),
        ("shuffle_gauss", {"local_noise": "False"}, "local_noise"),
        ("shuffle_gauss", {"wrap_model": None}, "wrap_model"),
        ("shuffled_checkin", {"poisson_sampling": "False"}, "poisson_sampling"),
        ("shuffled_checkin", {"data_loader": None}, "data_loader"),
        ("shuffled_checkin", {"optimizer": 5}, "optimizer"),
        ("shuffled_checkin", {"module": None}, "module"),
        ("shuffle_gauss", {"poisson_sampling": True}, "poisson_sampling"),
        ("subsampled_shuffle", {"poisson_sampling": True}, "poisson_sampling"),
        ("shuffled_checkin", {"poisson_sampling": False}, "poisson_sampling"),
        ("shuffled_checkin", {"grad_sample_mode": "no_op"}, "grad_sample_mode"),
        ("shuffled_checkin", {"grad_sample_mode": "hook"}, "grad_sample_mode"),
        (
            "shuffled_checkin",
            {"grad_sample_mode": "ghost", "clipping": "per_layer", "max_grad_norm": [1.0] * 4},
            "ghost",
        ),
        ("shuffled_checkin", {"loss_reduction": "median"}, "loss_reduction"),
        (
            "shuffled_checkin",
            {"grad_sample_mode": "ghost", "criterion": nn.MSELoss(reduction="sum")},
            "reduction",
        ),
        ("shuffled_checkin", {"noise_generator": "cpu"}, "noise_generator"),
        ("rdp", {"clipping": "adaptive", "local_noise": False, "target": 3}, "target=3"),
        ("shuffled_fw", {}, "leave out local_noise=True"),
        ("shuffled_fw", {"local_noise": False, "poisson_sampling": False}, "poisson_sampling"),
        ("shuffled_fw", {"local_noise": False, "clipping": "adaptive"}, "clipping"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_half_changed(name, change, named):
    toy = make_toy()
    engine = PrivacyEngine(accountant=name)
    before = (copy.deepcopy(engine.accountant.__dict__), engine.dataset)
    hooks = len(toy["module"][0]._forward_hooks)
    with pytest.raises(ValueError, match=named):
        engine.make_private(
            **{**toy, "noise_multiplier": 1.0, "local_noise": name != "rdp", **change}
        )
    assert (engine.accountant.__dict__, engine.dataset) == before
    assert len(toy["module"][0]._forward_hooks) == hooks
    traces = ("grad_sample", "summed_grad", "_norm_sample", "_forward_counter")
    assert not any(
        hasattr(parameter, name) for parameter in toy["module"].parameters() for name in traces
    )
    assert type(toy["optimizer"]) is torch.optim.SGD
    # and the same objects still serve
    usable = PrivacyEngine(accountant="shuffle_gauss")
    model, optimizer, loader = usable.make_private(**toy, noise_multiplier=1.0, local_noise=True)
    run_epoch(model, optimizer, loader)
    assert len(usable.accountant) == 4


def test_a_model_that_opacus_refuses_is_left_alone():
    toy = make_toy()
    toy["module"].append(nn.BatchNorm1d(3))
    engine = PrivacyEngine(accountant="shuffled_checkin")
    with pytest.raises(opacus.validators.errors.UnsupportedModuleError):
        engine.make_private(**toy, noise_multiplier=1.0, local_noise=True)
    assert engine.accountant.planned is None
    assert engine.dataset is None


def test_a_distributed_network_without_a_process_group_is_refused():
    toy = make_toy()

    class DPDDP(opacus.distributed.DifferentiallyPrivateDistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    toy["module"] = DPDDP(toy["module"])
    with pytest.raises(ValueError, match="there is no process group"):
        PrivacyEngine(accountant="shuffled_checkin").make_private(**toy, noise_multiplier=1.0)


def test_training_goes_on_with_the_same_engine_but_not_with_other_data():
    toy = make_toy()
    engine = PrivacyEngine(accountant="shuffled_checkin")
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0, local_noise=True)
    run_epoch(model, optimizer, loader)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        max_grad_norm=1.0,
        noise_multiplier=3.0,
        local_noise=True,
    )
    run_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(2.0, 0.25, 4), (3.0, 0.25, 4)]
    with pytest.raises(ValueError, match="new PrivacyEngine"):
        engine.make_private(**make_toy(records=48), noise_multiplier=2.0, local_noise=True)
    with pytest.raises(ValueError, match="new PrivacyEngine"):
        engine.make_private(**make_toy(), noise_multiplier=2.0, local_noise=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target_epsilon": 0}, "target_epsilon"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1.5}, "epochs"),
        ({"epochs": "3"}, "epochs"),
        ({"target_delta": "1e-5"}, "target_delta"),
        ({"local_noise": 1}, "local_noise"),
        ({"data_loader": [1]}, "data_loader"),
        ({"bound": "loose"}, "bound"),
        ({"bound": "published", "adjacency": "replace"}, "certified"),
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"num_user": 3}, "num_user"),
        pytest.param(
            {"bound": "published", "target_epsilon": 1e-9}, "certified", marks=pytest.mark.zoo
        ),
    ],
)
def test_bad_budgets_are_named(change, named):
    budget = {"target_epsilon": 4.0, "target_delta": 1e-5, "epochs": 2}
    engine = PrivacyEngine(accountant="shuffle_gauss")
    with pytest.raises(ValueError, match=named):
        engine.make_private_with_epsilon(**{**make_toy(), **budget, **change})
    assert engine.accountant.planned is None


def test_a_spent_budget_warns_before_calibrating_again():
    engine = PrivacyEngine(accountant="shuffle_gauss")
    toy = make_toy()
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0, local_noise=True)
    run_epoch(model, optimizer, loader)
    with pytest.warns(UserWarning, match="already spent"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            max_grad_norm=1.0,
            local_noise=True,
            target_epsilon=9.0,
            target_delta=1e-5,
            epochs=1,
        )


def test_the_mixin_stacks_on_another_engine():
    calls = []

    class Other(opacus.PrivacyEngine):
        def make_private(self, **keywords):
            calls.append(sorted(keywords))
            return super().make_private(**keywords)

    class Both(ShuffleMixin, Other):
        pass

    model, optimizer, loader = Both(accountant="shuffled_checkin").make_private(
        **make_toy(), noise_multiplier=1.0, local_noise=True
    )
    run_epoch(model, optimizer, loader)
    assert len(calls) == 1
    assert "local_noise" not in calls[0]


def test_the_report_shows_every_bound_and_refuses_when_nothing_ran():
    engine = PrivacyEngine(accountant="shuffled_checkin")
    with pytest.raises(ValueError, match="nothing to report"):
        engine.privacy_report(1e-5)
    model, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=2.0)
    run_epoch(model, optimizer, loader)
    printed = str(engine.privacy_report(1e-5))
    assert "certified" in printed
    assert "added once to the sum" in printed


def test_an_error_after_the_shuffling_of_weights_was_attached_ends_it(monkeypatch):
    def interrupted(scheme, run, made):
        Scheme.attach(scheme, run, made)
        raise KeyboardInterrupt

    toy = make_toy()
    engine = PrivacyEngine(accountant="shuffled_checkin")
    monkeypatch.setattr(GaussianReports, "attach", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        engine.make_private(**toy, noise_multiplier=1.0, shuffle_weights=True)
    assert engine.shuffler is None
    toy["module"](torch.randn(4, 5)).sum().backward()
    toy["optimizer"].step()
    for name, weight in toy["module"].named_parameters():
        assert torch.equal(toy["module"].state_dict()[name], weight)


def test_an_error_while_the_last_parts_are_attached_leaves_nothing_behind(monkeypatch):
    def fails(*_, **__):
        raise ValueError("no shuffler today")

    toy = make_toy()
    engine = PrivacyEngine(accountant="shuffled_checkin")
    before = (copy.deepcopy(engine.accountant.__dict__), engine.dataset)
    with monkeypatch.context() as patched:
        patched.setattr("opacus_shuffle.engine.schemes.base.start_shuffling", fails)
        with pytest.raises(ValueError, match="no shuffler today"):
            engine.make_private(**toy, noise_multiplier=1.0)
    assert (engine.accountant.__dict__, engine.dataset) == before
    assert not toy["module"][0]._forward_hooks
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=1.0, local_noise=True)
    run_epoch(model, optimizer, loader)
    assert len(engine.accountant) == len(loader)
