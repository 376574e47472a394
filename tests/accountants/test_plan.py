"""A plan states noise that keeps its budget, and numbers of users that do what it says of them."""

from __future__ import annotations

import json
import math

import pytest
from opacus.accountants import PRVAccountant
from scipy.special import ndtr

from opacus_shuffle.accountants.bounds.registry import compute_baseline, compute_bound
from opacus_shuffle.accountants.communication import sent_per_user
from opacus_shuffle.accountants.plan import COARSE, TOLERANCE, plan
from opacus_shuffle.commands import plan as plan_command
from opacus_shuffle.commands.main import main
from opacus_shuffle.core.tables import WIDTH

ASKED = {
    "num_users": 400,
    "steps": 3,
    "target_epsilon": 10.0,
    "target_delta": 1e-5,
    "sample_rate": 0.25,
    "dimension": 50,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ASKED.items()]


@pytest.fixture(scope="module")
def found():
    return plan(**ASKED)


def epsilon_at(row, sigma, *, users=400):
    fields = {"dimension": 50} if "dimension" in row.round.field_names() else {}
    rate = {} if row.round.sampling is None else {"sample_rate": 0.25}
    round_ = row.round.build(noise_multiplier=sigma, num_users=users, **rate, **fields)
    compute, which = (
        (compute_bound, "bound")
        if row.bound.bound == "certified"
        else (compute_baseline, "baseline")
    )
    return compute([(round_, 3)], delta=1e-5, **{which: row.bound.bound}).epsilon


@pytest.mark.zoo
def test_every_kind_of_trust_has_a_row_from_nobody_to_the_server(found):
    assert [(row.trusted, row.mechanism) for row in found.rows] == [
        ("nobody", "shuffled_checkin"),
        ("the shuffler", "shuffle_gauss"),
        ("the shuffler", "shuffled_checkin"),
        ("the shuffler", "shuffled_sums"),
        ("the aggregation", "shuffled_checkin"),
        ("the server", "shuffled_checkin"),
    ]


@pytest.mark.zoo
def test_the_noise_of_every_row_keeps_the_budget_and_hardly_less_would_not(found):
    for row in found.rows:
        assert row.bound.epsilon <= 10.0
        grid = 0.03 if row.mechanism == "shuffled_sums" else 0  # whose bits allow not every noise
        assert epsilon_at(row, row.round.noise_multiplier * (1 - 2 * TOLERANCE - grid)) > 10.0


@pytest.mark.zoo
def test_the_server_s_row_is_dp_sgd_by_opacus_s_own_accountant(found):
    *_, server = found.rows
    accountant = PRVAccountant()
    accountant.history = [(server.server_noise_multiplier, 0.25, 3)]
    assert accountant.get_epsilon(1e-5) == pytest.approx(10.0, rel=0.02)
    assert server.users_needed == 400
    assert server.noise_of_mean == pytest.approx(server.server_noise_multiplier / 100)


@pytest.mark.zoo
@pytest.mark.parametrize("place", [0, 1])
def test_so_many_users_have_a_mean_as_quiet_as_the_server_s_and_fewer_have_not(found, place):
    row, server = found.rows[place], found.rows[-1]
    rate = 1.0 if row.round.sampling is None else 0.25

    def sigma(users):  # of one report, such that the mean of B of them has the server's noise
        return server.noise_of_mean * math.sqrt(rate * users)

    users = row.users_needed
    assert epsilon_at(row, sigma(users), users=users) <= 10.0
    fewer = math.floor(users * (1 - 3 * COARSE))
    assert epsilon_at(row, sigma(fewer), users=fewer) > 10.0


@pytest.mark.zoo
def test_without_a_dimension_what_must_know_it_is_left_out_and_everyone_in_every_round_needs_no_coins():
    rows = plan(**{**ASKED, "dimension": None, "sample_rate": 1.0}).rows
    assert [(row.trusted, row.mechanism) for row in rows] == [
        ("nobody", "shuffle_gauss"),
        ("the shuffler", "shuffle_gauss"),
        ("the aggregation", "shuffle_gauss"),
        ("the server", "shuffle_gauss"),
    ]


@pytest.mark.zoo
def test_every_row_but_the_server_s_says_what_a_user_sends(found):
    *rows, server = found.rows
    assert server.sent is None
    for row in rows:
        assert row.sent == sent_per_user([(row.round, 3)], dimension=50)
    gaussian, sums = rows[1], rows[3]
    assert (gaussian.to_dict()["bytes_per_user"], gaussian.to_dict()["bits_per_coordinate"]) == (
        3 * 50 * 4,
        32,
    )
    printed = " ".join(str(found).split())
    assert "shuffle_gauss, shuffled_sums: all users report in every round." in printed
    assert f"By shuffled_sums: {sums.sent}" in printed
    assert max(map(len, str(found).splitlines())) <= WIDTH
    assert "zero_out compared with a run in which one record reports zero" in printed
    for row in rows:
        assert (
            row.bound.meaning in printed
        )  # what an ε counts on, such as hidden participation, stands beside it
        assert row.to_dict()["meaning"] == row.bound.meaning


# --- ten users in every round, where all but the shuffler's row has a closed form
# ------------------------------------


def gaussian_delta(mu, epsilon):
    """δ(ε) of the Gaussian mechanism."""
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


@pytest.fixture(scope="module")
def of_ten():
    return plan(num_users=10, steps=2, target_epsilon=10.0, target_delta=1e-5)


def test_ten_users_have_a_row_for_every_kind_of_trust_and_its_noise_is_the_gaussian_mechanism_s(
    of_ten,
):
    trusted = ["nobody", "the shuffler", "the aggregation", "the server"]
    assert [row.trusted for row in of_ten.rows] == trusted
    assert {row.mechanism for row in of_ten.rows} == {"shuffle_gauss"}
    assert all(row.bound.epsilon <= 10.0 for row in of_ten.rows)
    for row, reports in ((of_ten.rows[0], 1), *((row, 10) for row in of_ten.rows[2:])):
        mu = math.sqrt(2 / reports) / row.round.noise_multiplier
        assert gaussian_delta(mu, 10.0) <= 1e-5 < gaussian_delta(mu * (1 + 2 * TOLERANCE), 10.0)
        assert row.noise_of_mean == pytest.approx(row.round.noise_multiplier / math.sqrt(10))
        assert row.server_noise_multiplier == pytest.approx(10 * row.noise_of_mean)


def test_trusting_nobody_takes_the_square_of_the_users(of_ten):
    nobody, shuffler, *trusting = of_ten.rows
    assert 100 <= nobody.users_needed <= math.ceil(100 * (1 + COARSE))
    assert 10 < shuffler.users_needed <= nobody.users_needed
    assert {row.users_needed for row in trusting} == {10}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_users": 0}, "num_users"),
        ({"steps": 0}, "steps"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"target_epsilon": -1}, "target_epsilon"),
        ({"target_delta": 1}, "target_delta"),
        ({"dimension": 0.5}, "dimension"),
        ({"noise_multiplier": 1}, "noise_multiplier"),
        ({"honest_part": 0.5}, "honest_fraction"),
        (
            {"honest_fraction": float("nan"), "dimension": None},
            "honest_fraction=nan.*pass dimension",
        ),
        ({"honest_fraction": float("nan")}, "honest_fraction"),
    ],
)
def test_bad_input_is_refused_by_name(wrong, named):
    with pytest.raises(ValueError, match=named):
        plan(**{**ASKED, **wrong})


@pytest.mark.zoo
def test_the_command_prints_the_same_rows(capsys, found, monkeypatch):
    asked = []
    monkeypatch.setattr(plan_command, "plan", lambda **options: asked.append(options) or found)
    assert main(["plan", *FLAGS]) == 0
    assert capsys.readouterr().out.strip() == str(found)
    assert main(["plan", *FLAGS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_dict()))
    assert asked == [ASKED, ASKED]
