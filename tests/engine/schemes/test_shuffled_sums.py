"""Training with shuffled sums: the gradient's distribution, batches in pieces, what is refused, and a run from end to end."""

from __future__ import annotations

import copy
import io
import math
import warnings

import opacus
import pytest
import torch
from helpers.shuffled_runs import in_record
from helpers.toy import make_toy, run_epoch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

TOY = 5 * 40 + 40 + 40 * 3 + 3
"""What the toy network trains."""


SAMPLES = {"poisson_sampling": False}
"""Batches of one size, all of whose records report; else everyone does."""


def protocol_for(
    records=6,
    dimension=TOY,
    *,
    max_norm=1.0,
    epsilon=1.0,
    delta=1e-5,
    calibration="tight",
    **options,
):
    return ShuffleVectorSum(
        records,
        dimension,
        max_norm,
        epsilon=epsilon,
        delta=delta,
        calibration=calibration,
        **options,
    )


# --- the engine
# -------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_is_accounted():
    torch.manual_seed(0)
    x = torch.randn(2000, 2)
    y = (x @ torch.tensor([1.0, -2.0]) > 0).long()
    model = nn.Linear(2, 2)
    engine = PrivacyEngine(accountant="shuffled_sums")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=200),
        max_grad_norm=1.0,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=4,
        adjacency="replace",
        noise_generator=torch.Generator().manual_seed(1),
    )
    for _ in range(4):
        run_epoch(model, optimizer, loader)
    assert (model(x).argmax(1) == y).float().mean() > 0.9
    assert engine.accountant.history == [(optimizer.noise_multiplier, 0.1, 40)]
    assert 1.9 < engine.get_epsilon(1e-5, adjacency="replace") <= 2.0
    assert "certified" in str(engine.privacy_report(1e-5))
    # sampled protocols need less noise than rounds that everyone takes part in
    everyone = ShuffleVectorSum(200, 6, 1.0, 2.0, 1e-5, rounds=40, calibration="tight")
    assert optimizer.aggregator.variance < everyone.variance / 4


@pytest.mark.parametrize("bound", ["certified", "published"])
@pytest.mark.parametrize("adjacency", [None, "zero_out", "replace"])
def test_the_budget_is_met_and_used_up(bound, adjacency):
    engine = PrivacyEngine(accountant="shuffled_sums")
    options = {"bound": bound} if adjacency is None else {"bound": bound, "adjacency": adjacency}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, loader = engine.make_private_with_epsilon(
            **make_toy(), target_epsilon=1.5, target_delta=1e-5, epochs=2, **options
        )
    for _ in range(2):
        run_epoch(model, optimizer, loader)
    assert optimizer.aggregator.calibration == ("published" if bound == "published" else "tight")
    assert engine.get_epsilon(1e-5, **options) <= 1.5
    if bound == "certified":  # a grid has at most 2.5 % more noise than asked for
        assert engine.get_epsilon(1e-5, **options) > 1.42


def test_a_record_that_becomes_zero_takes_about_half_the_noise_of_one_that_is_replaced():
    noise = {}
    for adjacency in ("zero_out", "replace"):
        engine = PrivacyEngine(accountant="shuffled_sums")
        toy = make_toy(records=6, batch_size=6)
        budget = {"target_epsilon": 1.5, "target_delta": 1e-5, "epochs": 4, "adjacency": adjacency}
        _, optimizer, _ = engine.make_private_with_epsilon(**toy, **budget)
        noise[adjacency] = optimizer.noise_multiplier
    assert noise["replace"] == pytest.approx(2 * noise["zero_out"], rel=0.06)


def test_a_noise_multiplier_is_the_sum_s_as_in_opacus():
    engine = PrivacyEngine(accountant="shuffled_sums")
    model, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=1.1)
    assert 1.1 <= optimizer.noise_multiplier <= 1.1 * 1.025
    deviation = optimizer.aggregator.variance**0.5
    assert 1.1 <= deviation <= 1.1 * 1.06  # noise as Gaussian as its covering one, and the rounding
    run_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(optimizer.noise_multiplier, 0.25, 4)]


def test_an_aggregator_of_your_own_is_held_to_the_budget():
    budget = {"target_epsilon": 1.5, "target_delta": 1e-5, "epochs": 2}
    found = (
        PrivacyEngine(accountant="shuffled_sums")
        .make_private_with_epsilon(**make_toy(), **budget)[1]
        .aggregator
    )
    again = PrivacyEngine(accountant="shuffled_sums").make_private_with_epsilon(
        **make_toy(), **budget, aggregator=found
    )[1]
    assert again.aggregator is found
    with pytest.raises(ValueError, match=r"not met by the aggregator.*leave the aggregator out"):
        PrivacyEngine(accountant="shuffled_sums").make_private_with_epsilon(
            **make_toy(), **{**budget, "epochs": 4}, aggregator=found
        )


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_every_way_to_per_record_gradients_goes(mode):
    engine = PrivacyEngine(accountant="shuffled_sums")
    model, optimizer, loader = engine.make_private(
        **make_toy(), **SAMPLES, aggregator=protocol_for(), grad_sample_mode=mode
    )
    run_epoch(model, optimizer, loader)
    assert len(engine.accountant) == 4


def test_a_checkpoint_restores_the_accountant_and_refuses_another_protocol():
    def private(protocol):
        toy = make_toy()
        engine = PrivacyEngine(accountant="shuffled_sums")
        return engine, *engine.make_private(**toy, **SAMPLES, aggregator=protocol)

    engine, model, optimizer, loader = private(protocol_for())
    run_epoch(model, optimizer, loader)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    again, other, steps, _ = private(protocol_for())
    file.seek(0)
    again.load_checkpoint(path=file, module=other, optimizer=steps)
    assert again.accountant.history == engine.accountant.history
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    different, other, steps, _ = private(protocol_for(epsilon=0.5))
    file.seek(0)
    with pytest.raises(ValueError, match="state_dict speaks of"):
        different.load_checkpoint(path=file, module=other, optimizer=steps)


def test_some_may_drop_out_where_everyone_takes_part_and_the_protocol_allows_it():
    """Six records, at least half of them honest: three suffice, two do not; in a sample all must be there."""

    def stepped(records, batch, count):
        toy = make_toy(records=records, batch_size=batch)
        engine = PrivacyEngine(accountant="shuffled_sums")
        protocol = protocol_for(batch, honest_fraction=0.5)
        model, optimizer, loader = engine.make_private(**toy, **SAMPLES, aggregator=protocol)
        x, y = next(iter(loader))
        nn.CrossEntropyLoss()(model(x[:count]), y[:count]).backward()
        optimizer.step()
        return len(engine.accountant)

    assert stepped(6, 6, 3) == 1
    with pytest.raises(ValueError, match=r"num_reports|users"):
        stepped(6, 6, 2)
    with pytest.raises(ValueError, match=r"honest_fraction is 0.5.*samples"):
        stepped(24, 6, 5)


# --- refusals
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"aggregator": None}, "noise_multiplier is missing"),
        ({"aggregator": None, "noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        (
            {"aggregator": None, "noise_multiplier": 0.01},
            "noise_multiplier of a shuffled sum must be at least",
        ),
        ({"aggregator": "tight"}, "ShuffleVectorSum"),
        ({"noise_multiplier": 1.0}, "noise_multiplier=1.0"),
        ({"grad_sample_mode": "ghost"}, "grad_sample_mode"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, "clipping"),
        ({"clipping": "adaptive"}, "clipping"),
        ({"local_noise": True}, "local_noise"),
        ({"batch_clip": 1.0}, "batch_clip"),
        ({"batch_clip": 1.0, "shuffle_weights": True}, "batch_clip"),
        ({"unshuffled_noise_multiplier": 3.0}, "unshuffled_noise_multiplier"),
        ({"max_grad_norm": 2.0}, "max_norm"),
        ({"aggregator": protocol_for(5)}, "num_users=6"),
        ({"aggregator": protocol_for(dimension=TOY + 1)}, f"dimension={TOY}"),
        ({"poisson_sampling": True}, "all 24 records report in every round.*num_users=24"),
        ({"agregator": protocol_for()}, "aggregator"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_and_leaves_no_trace(changes, named):
    engine = PrivacyEngine(accountant="shuffled_sums")
    toy = make_toy()
    before = copy.deepcopy(engine.accountant.__dict__)
    with pytest.raises(ValueError, match=named):
        engine.make_private(
            **in_record(**{**toy, **SAMPLES, "aggregator": protocol_for(), **changes})
        )
    assert engine.accountant.__dict__ == before
    assert not hasattr(next(toy["module"].parameters()), "grad_sample")


def test_aggregators_go_with_their_own_accountant_alone():
    for name in ("prv", "subsampled_shuffle", "shuffled_fw"):
        with pytest.raises(ValueError, match="accountant='shuffled_sums'"):
            PrivacyEngine(accountant=name).make_private(**make_toy(), aggregator=protocol_for())
        with pytest.raises(ValueError, match="accountant='shuffled_sums'"):
            PrivacyEngine(accountant=name).make_private_with_epsilon(
                **make_toy(),
                target_epsilon=1.0,
                target_delta=1e-5,
                epochs=1,
                aggregator=protocol_for(),
            )
    with pytest.raises(ValueError, match="noise_multiplier is missing"):
        PrivacyEngine(accountant="prv").make_private(**make_toy())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"aggregator": "tight"}, "aggregator must be a ShuffleVectorSum"),
        ({"aggregator": protocol_for(5)}, "num_users=6"),
        ({"aggregator": protocol_for(epsilon=5.0)}, "not met by the aggregator"),
        ({"bound": "tight"}, "bound"),
        ({"adjacency": "add"}, "adjacency"),
        ({"max_grad_norm": [1.0]}, "max_grad_norm"),
        ({"target_epsilon": 301.0}, "epsilon must not exceed 300, got 301.0"),
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
    ],
    ids=str,
)
def test_what_no_protocol_can_be_built_for_is_refused(changes, named):
    budget = {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1}
    with pytest.raises(ValueError, match=named):
        PrivacyEngine(accountant="shuffled_sums").make_private_with_epsilon(
            **{**make_toy(), **SAMPLES, **budget, **changes}
        )


def test_a_stock_engine_is_told_which_one_to_use():
    with pytest.raises(ValueError, match=r"opacus_shuffle\.PrivacyEngine"):
        opacus.PrivacyEngine(accountant="shuffled_sums").make_private(
            **make_toy(), noise_multiplier=1.0
        )


def test_a_second_protocol_in_one_engine_is_refused():
    engine = PrivacyEngine(accountant="shuffled_sums")
    engine.make_private(**make_toy(), **SAMPLES, aggregator=protocol_for())
    engine.make_private(
        **make_toy(), **SAMPLES, aggregator=protocol_for()
    )  # the same again is fine
    with pytest.raises(ValueError, match="use a new PrivacyEngine"):
        engine.make_private(**make_toy(), **SAMPLES, aggregator=protocol_for(epsilon=0.5))


@pytest.mark.parametrize("change", ["freeze", "freeze all", "norm", "multiplier"])
def test_what_changes_after_make_private_is_refused(change):
    engine = PrivacyEngine(accountant="shuffled_sums")
    toy = make_toy()
    model, optimizer, loader = engine.make_private(**toy, **SAMPLES, aggregator=protocol_for())
    x, y = next(iter(loader))
    nn.CrossEntropyLoss()(model(x), y).backward()
    raw = [parameter.grad.clone() for parameter in toy["module"].parameters()]
    if change == "freeze":
        next(toy["module"].parameters()).requires_grad_(False)
    elif change == "freeze all":
        toy["module"].requires_grad_(False)
    elif change == "norm":
        optimizer.max_grad_norm = 2.0
    else:
        optimizer.noise_multiplier = 100.0
    before = [parameter.detach().clone() for parameter in toy["module"].parameters()]
    with pytest.raises(ValueError, match=r"dimension|max_norm|noise_multiplier|aggregator|frozen"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, toy["module"].parameters(), strict=True))
    left = [parameter.grad for parameter in toy["module"].parameters()]
    assert all(
        b is None or torch.equal(a, b) for a, b in zip(raw, left, strict=True)
    )  # and no noised sum was released unaccounted
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_record_that_nothing_can_be_computed_of_does_not_stop_the_round(value):
    """An error would be an event of its own, seen by everyone and covered by no epsilon."""
    toy = make_toy()
    toy["module"].double()
    engine = PrivacyEngine(accountant="shuffled_sums")
    model, optimizer, loader = engine.make_private(**toy, **SAMPLES, aggregator=protocol_for())
    x = next(iter(loader))[0].double()
    x[2] = value
    model(x).sum().backward()
    optimizer.step()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert len(engine.accountant) == 1


def test_after_a_step_nothing_on_the_optimizer_tells_the_noise():
    toy = make_toy()
    model, optimizer, loader = PrivacyEngine(accountant="shuffled_sums").make_private(
        **toy, **SAMPLES, aggregator=protocol_for()
    )
    model(next(iter(loader))[0]).sum().backward()
    optimizer.step()
    assert optimizer.noise.counts is None
