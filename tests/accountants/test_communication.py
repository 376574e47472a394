"""What one user sends over a run, and where it is said."""

import json

import pytest
import torch
from shuffled_bits import randomize

from opacus_shuffle import ShuffledSums, ShuffledWeights, ShuffleGauss, ShuffleVectorSum
from opacus_shuffle.accountants.mechanism import sent_per_user
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.commands.main import main

PROTOCOLS = {
    "tight": ShuffleVectorSum(50, 20, 1.0, epsilon=1.0, delta=1e-6),
    "drop-outs": ShuffleVectorSum(50, 20, 1.0, epsilon=1.0, delta=1e-6, honest_fraction=0.5),
}
SUMS = ShuffledSums.of_protocol(PROTOCOLS["tight"], sample_rate=0.5)


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_sums_say_as_many_bits_as_one_users_messages_have(protocol):
    message = randomize(protocol, torch.zeros(20))
    sent = sent_per_user([(ShuffledSums.of_protocol(protocol, sample_rate=0.3), 7)])
    assert sent.bits_per_coordinate == message.bits_per_report
    # By secret coins, all report in every round.
    assert sent.bytes_per_user == -(-7 * 20 * message.bits_per_report // 8)
    counts = message.bits_per_report + 1  # 0, 1, ... ones
    assert 2 ** (sent.count_bits_per_coordinate - 1) < counts <= 2**sent.count_bits_per_coordinate


def test_users_of_samples_send_in_the_rounds_that_they_are_drawn_for():
    everyone, sample = (
        sent_per_user([(ShuffledSums.of_protocol(PROTOCOLS["tight"], num_users=users), 40)])
        for users in (50, 200)
    )
    assert (everyone.every_round, sample.every_round) == (True, False)
    assert everyone.bytes_per_user == 4 * sample.bytes_per_user
    assert ("on average" in str(sample), "on average" in str(everyone)) == (True, False)


def test_nothing_is_said_where_it_is_not_known():
    gaussian, sums = (ShuffleGauss(noise_multiplier=5.0, num_users=50), 3), (SUMS, 3)
    weights = (ShuffledWeights(noise_multiplier=1.0, dimension=9), 3)
    for rounds, dimension in (
        ([], 9),
        ([gaussian], None),
        ([sums, gaussian], None),
        ([weights], 9),
    ):
        assert sent_per_user(rounds, dimension=dimension) is None
    assert "bytes_per_user" not in PrivacyReport([gaussian], delta=1e-5).to_dict()
    with pytest.raises(ValueError, match=r"dimension must be .*, got 0"):
        sent_per_user([gaussian], dimension=0)


FLAGS = [
    "--mechanism",
    "shuffled_sums",
    "--dimension",
    "20",
    "--num-users",
    "50",
    "--sample-rate",
    "0.5",
    "--steps",
    "3",
]
NOISE = ["--noise-multiplier", "2", "--delta", "1e-5"]
BUDGET = ["--target-epsilon", "2", "--target-delta", "1e-5"]


@pytest.mark.parametrize(
    ("command", "asked"),
    [("epsilon", NOISE), pytest.param("noise", BUDGET, marks=pytest.mark.zoo), ("report", NOISE)],
)
def test_reports_and_the_command_line_say_it_in_words_and_in_numbers(command, asked, capsys):
    assert main([command, *FLAGS, *asked]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert main([command, *FLAGS, *asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    bits, count = (answer[f"{kind}bits_per_coordinate"] for kind in ("", "count_"))
    assert answer["bytes_per_user"] == -(-3 * 20 * bits // 8)
    sentence = (
        f"Every user sends {bits:,} bits a coordinate ({count} if it hands the shuffler their"
    )
    assert sentence in text
