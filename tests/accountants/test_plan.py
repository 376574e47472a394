"""A plan states noise that keeps its budget."""

import json
import math

import pytest
from helpers.accountants import compute_baseline
from helpers.command_json import checked_answer
from helpers.hockey_sticks import gaussian_delta

from opacus_shuffle.accountants import compute_bound
from opacus_shuffle.accountants.mechanism import sent_per_user
from opacus_shuffle.accountants.plan import TOLERANCE, plan
from opacus_shuffle.commands.main import main

ASKED = {
    "num_users": 400,
    "steps": 3,
    "target_epsilon": 10.0,
    "target_delta": 1e-5,
    "sample_rate": 0.25,
    "dimension": 50,
}
ROWS = [
    ("nobody", "shuffled_checkin"),
    ("the shuffler", "shuffle_gauss"),
    ("the shuffler", "shuffled_checkin"),
    ("the shuffler", "secret_checkin"),
    ("the shuffler", "shuffled_sums"),
    ("the aggregation", "shuffled_checkin"),
    ("the server", "random_allocation"),
    ("the server", "shuffled_checkin"),
]


@pytest.fixture(scope="module")
def asked():
    return plan(**ASKED)


def epsilon_at(row, sigma):
    fields = {"num_users": 400}
    if "dimension" in row.round.field_names():
        fields["dimension"] = 50
    if row.round.sampling is not None:
        fields["sample_rate"] = 0.25
    steps = 3
    if row.mechanism == "random_allocation":
        fields["num_batches"] = steps = 4  # the epoch that three rounds begin
    rounds = [(row.round.build(noise_multiplier=sigma, **fields), steps)]
    if row.bound.bound == "certified":
        return compute_bound(rounds, delta=1e-5).epsilon
    return compute_baseline(rounds, delta=1e-5, baseline=row.bound.bound).epsilon


@pytest.mark.zoo
def test_every_kind_of_trust_has_a_row_whose_noise_keeps_the_budget_and_hardly_less_would_not(
    asked,
):
    assert [(row.trusted, row.mechanism) for row in asked.rows] == ROWS
    for row in asked.rows:
        assert row.bound.epsilon <= 10.0
        grid = 0.03 if row.mechanism == "shuffled_sums" else 0  # whose bits allow not every noise
        assert epsilon_at(row, row.round.noise_multiplier * (1 - 2 * TOLERANCE - grid)) > 10.0


@pytest.mark.zoo
def test_every_row_says_what_a_user_sends_and_what_its_epsilon_counts_on(asked, capsys):
    printed = " ".join(str(asked).split())
    for row in asked.rows[:-2]:
        assert row.sent == sent_per_user([(row.round, 3)], dimension=50)
    assert all(row.sent is None for row in asked.rows[-2:])  # the server is handed the record once
    gaussian, sums = (asked.rows[place].to_dict() for place in (1, 4))
    assert (gaussian["bytes_per_user"], gaussian["bits_per_coordinate"]) == (3 * 50 * 4, 32)
    assert f"By shuffled_sums: {asked.rows[4].sent}" in printed
    assert "shuffled_sums counts on every user to draw and hide who takes part" in printed
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ASKED.items()]
    assert main(["plan", *flags, "--json"]) == 0
    answer = checked_answer(capsys.readouterr().out)
    assert answer["rows"][4] == json.loads(json.dumps(sums))


def test_random_allocation_takes_less_noise_than_the_server_s_poisson_batches(asked):
    """It has a row where the batches nearest to the rate are at least two, one a user at most."""
    allocated, server = asked.rows[-2:]
    assert (allocated.round.num_batches, allocated.bound.rounds) == (4, 3)  # of a whole epoch
    assert epsilon_at(allocated, allocated.round.noise_multiplier) <= 10.0
    assert allocated.noise_of_mean < 0.9 * server.noise_of_mean
    assert allocated.round.num_users == 400
    assert "random_allocation: 4 batches per epoch" in str(asked)
    assert "nothing can be learned" not in str(asked)


@pytest.mark.zoo
def test_one_batch_and_more_batches_than_users_are_no_random_allocation():
    for rate in (0.7, 0.09):  # one batch; 11 batches of 10 users
        costs = plan(num_users=10, steps=1, target_epsilon=2.0, target_delta=1e-3, sample_rate=rate)
        assert costs.rows[-1].mechanism == "shuffled_checkin"
        assert "random_allocation" not in {row.mechanism for row in costs.rows}


# --- ten users in every round, where all but the shuffler's row has a closed form


def test_ten_users_take_the_noise_of_the_gaussian_mechanism():
    """Everyone in every round needs no coins, but secret ones."""
    budget = {"num_users": 10, "steps": 2, "target_epsilon": 10.0, "target_delta": 1e-5}
    costs = plan(**budget)
    rows = costs.rows
    _, _, secret, sums, *_ = rows
    assert (secret.mechanism, sums.mechanism) == ("secret_checkin", "shuffled_sums")
    assert max(secret.bound.epsilon, sums.bound.epsilon) <= 10.0
    # All rounds' gradients together stand out from this noise by a factor of 7 at most.
    assert "clipping norms (nobody, shuffle_gauss)" in " ".join(str(costs).split())
    # Whatever number of parameters is taken where none is given.
    same = plan(**budget, dimension=50).rows[3]
    assert sums.server_noise_multiplier == pytest.approx(same.server_noise_multiplier, rel=0.01)
    rows = [row for row in rows if row not in (secret, sums)]
    trusted = ["nobody", "the shuffler", "the aggregation", "the server"]
    assert [row.trusted for row in rows] == trusted
    for row, reports in ((rows[0], 1), *((row, 10) for row in rows[2:])):
        mu = math.sqrt(2 / reports) / row.round.noise_multiplier
        assert gaussian_delta(mu, 10.0) <= 1e-5 < gaussian_delta(mu * (1 + 2 * TOLERANCE), 10.0)
        assert row.noise_of_mean == pytest.approx(row.round.noise_multiplier / math.sqrt(10))
        assert row.server_noise_multiplier == pytest.approx(10 * row.noise_of_mean)
    assert rows[1].bound.epsilon <= 10.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_users", 0),
        ("steps", 0),
        ("sample_rate", 1.5),
        ("target_epsilon", -1),
        ("target_delta", 1),
        ("dimension", 0.5),
    ],
)
def test_bad_input_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        plan(**{**ASKED, name: value})
