"""What one user sends over a run, and where it is said."""

from __future__ import annotations

import json

import pytest
import torch

from opacus_shuffle import ShuffledSums, ShuffledWeights, ShuffleGauss, ShuffleVectorSum
from opacus_shuffle.accountants.communication import sent_per_user
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.commands.main import main

PROTOCOLS = {
    "tight": ShuffleVectorSum(50, 20, 1.0, epsilon=1.0, delta=1e-6),
    "drop-outs": ShuffleVectorSum(50, 20, 1.0, epsilon=1.0, delta=1e-6, honest_fraction=0.5),
    "published": ShuffleVectorSum(50, 20, 1.0, epsilon=2.0, delta=1e-5, calibration="published"),
}
SUMS = [
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


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_sums_say_as_many_bits_as_one_users_messages_have(protocol):
    message = protocol.randomize(torch.zeros(20))
    sent = sent_per_user([(ShuffledSums.of_protocol(protocol, sample_rate=0.3), 7)])
    assert sent.bits_per_coordinate == message.bits_per_report
    assert sent.bytes_per_user == -(
        -7 * 20 * message.bits_per_report // 8
    )  # by secret coins, all report in every round
    counts = message.bits_per_report + 1  # 0, 1, ... ones
    assert 2 ** (sent.count_bits_per_coordinate - 1) < counts <= 2**sent.count_bits_per_coordinate


def test_users_of_samples_send_in_the_rounds_that_they_are_drawn_for():
    everyone, sample = (
        sent_per_user([(ShuffledSums.of_protocol(PROTOCOLS["tight"], num_users=users), 40)])
        for users in (50, 200)
    )
    assert everyone.every_round
    assert not sample.every_round
    assert everyone.bytes_per_user == 4 * sample.bytes_per_user
    assert "on average" in str(sample)
    assert "on average" not in str(everyone)


def test_nothing_is_said_where_it_is_not_known():
    gaussian = (ShuffleGauss(noise_multiplier=5.0, num_users=50), 3)
    sums = (ShuffledSums.of_protocol(PROTOCOLS["tight"]), 3)
    assert sent_per_user([]) is None
    assert sent_per_user([gaussian]) is None
    assert sent_per_user([sums, gaussian]) is None
    assert (
        sent_per_user([(ShuffledWeights(noise_multiplier=1.0, dimension=9), 3)], dimension=9)
        is None
    )
    assert sent_per_user([sums, gaussian], dimension=20).count_bits_per_coordinate is None
    report = PrivacyReport([gaussian], delta=1e-5)
    assert "bits a coordinate" not in str(report)
    assert "bytes_per_user" not in report.to_dict()
    with pytest.raises(ValueError, match=r"dimension must be .*, got 0"):
        sent_per_user([gaussian], dimension=0)


def test_reports_say_it_in_words_and_in_numbers():
    report = PrivacyReport(
        [(ShuffledSums.of_protocol(PROTOCOLS["tight"], sample_rate=0.5), 3)], delta=1e-5
    )
    sentence = str(sent_per_user(report.rounds))
    assert sentence in " ".join(str(report).split())
    found = json.loads(json.dumps(report.to_dict()))
    assert {name: found[name] for name in sent_per_user(report.rounds).to_dict()} == sent_per_user(
        report.rounds
    ).to_dict()


@pytest.mark.parametrize("command", ["epsilon", "noise", "report"])
def test_the_command_line_says_it(command, capsys):
    asked = (
        ["--target-epsilon", "2", "--target-delta"]
        if command == "noise"
        else ["--noise-multiplier", "2", "--delta"]
    )
    run = [command, *SUMS, *asked, "1e-5"]
    assert main(run) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert main([*run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    bits, count, sent = (
        found[name]
        for name in ("bits_per_coordinate", "count_bits_per_coordinate", "bytes_per_user")
    )
    assert (
        f"Every user sends {bits:,} bits a coordinate ({count} if it hands the shuffler their "
        "count) in every round" in told
    )
    assert sent == -(-3 * 20 * bits // 8)
