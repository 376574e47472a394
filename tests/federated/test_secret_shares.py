"""Aggregators who each hold one share of every report: what they see, and what they hand over."""

from collections import Counter

import numpy as np
import pytest
import torch
from helpers.federation import CLIENTS, SERVER, SUMS, ledger_of

from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.federated import (
    Aggregation,
    Aggregator,
    FileBook,
    RemoteShuffler,
    ReportFormat,
    SharedSumReports,
    ShuffledSumReports,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.secret_shares import TAG_BYTES

PLAIN = {**SUMS.settings, "kind": "shared_sum_reports"}
SHARED, THREE = (ReportFormat.of_settings({**PLAIN, "shares": shares}) for shares in (2, 3))
FIRST, SECOND = np.indices((256, 256), np.uint8).reshape(2, -1)  # every pair of bytes


def numbers_in(reports: SharedSumReports, report: bytes) -> np.ndarray:
    """Those of all shares of a report, without headers and tags: shape (k, d)."""
    return np.stack(
        [
            np.frombuffer(share, reports.count_type)[-reports.dimension :]
            for share in reports.shares_of(report)
        ]
    )


def split(monkeypatch, count: int, *drawn: np.ndarray) -> np.ndarray:
    """Splits a count 65,536 times by the random bytes that are given: shape (k, 65536)."""
    reports = ReportFormat.of_settings({**PLAIN, "dimension": 2**16, "shares": len(drawn) + 1})
    reports.bits = 12  # a byte holds the sum of twenty such counts
    monkeypatch.setattr(ShuffledSumReports, "randomize", lambda *_: bytes([count]) * 2**16)
    stream, listed = SecretGenerator(), iter([bytes(TAG_BYTES), *drawn])
    stream.words = lambda _: np.frombuffer(bytes(next(listed)), np.uint64)
    return numbers_in(reports, reports.encode(1, None, stream))


def seen(*columns: np.ndarray) -> Counter:
    """How often each outcome is seen in all that can be drawn: its exact distribution."""
    return Counter(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("count", [0, 5, 12])
def test_all_shares_but_one_are_uniform_and_have_one_complement(monkeypatch, count):
    shares = split(monkeypatch, count, FIRST, SECOND)
    # Of any two shares each pair of bytes is seen, once.
    assert all(len(seen(*shares[two])) == 256**2 for two in ([0, 1], [0, 2], [1, 2]))
    assert set(np.add.reduce(shares, dtype=np.uint8)) == {count}


@pytest.mark.parametrize("place", [0, 1])
def test_an_aggregator_with_the_server_sees_the_sum_and_nothing_else(monkeypatch, place):
    """Two clients' counts, and others with the same sum: their views are the same, exactly."""

    def view(one: int, other: int) -> Counter:
        both = split(monkeypatch, one, FIRST), split(monkeypatch, other, SECOND)
        return seen(*sum(both), *(shares[place] for shares in both))

    assert view(3, 9) == view(12, 0) == view(0, 12)
    assert view(3, 9).keys().isdisjoint(view(3, 8))  # so a view tells sums


@pytest.mark.parametrize("sets", [([0, 1], [1]), ([0], [0, 1]), ([0], [1])])
def test_sums_of_different_sets_are_uniform_together(monkeypatch, sets):
    """So aggregators need not agree on a set, as long as each hands over one sum."""
    both = split(monkeypatch, 12, FIRST), split(monkeypatch, 0, SECOND)
    sums = (sum(both[client][place] for client in them) for place, them in enumerate(sets))
    assert len(seen(*sums)) == 256**2


def aggregation_of(reports: SharedSumReports, books: tuple | None = None) -> Aggregation:
    """Aggregators in this process, with an open round 1."""
    aggregation = Aggregation(
        reports, [Aggregator(reports, book=book) for book in books or [None] * reports.shares]
    )
    aggregation.open_round(1, reports.fingerprint)
    return aggregation


def send(aggregation: Aggregation, number: int, clients: int = 20) -> np.ndarray:
    """Has clients report; returns the sum of their counts, which they alone can tell."""
    sent = [aggregation.format.encode(number, torch.ones(3)) for _ in range(clients)]
    for client, report in enumerate(sent):
        aggregation.submit(report, sender=str(client))
    return sum(numbers_in(aggregation.format, report).sum(axis=0, dtype="u4") for report in sent)


@pytest.mark.parametrize("reports", [SHARED, THREE], ids=["two", "three"])
def test_the_server_gets_the_sum_of_all_counts_at_the_same_epsilon(reports):
    ledger, sent = ledger_of(reports, aggregation_of(reports)), []
    for _ in range(2):
        released = ledger.run(
            lambda number: sent.append(send(ledger.shuffler, number)), lambda total: total
        )
        assert np.frombuffer(released.mixed, "<i8").tolist() == sent[-1].tolist()
    assert torch.equal(ledger.result, SUMS.estimate(released.mixed, 20))
    assert ledger.accountant.rounds == [(SUMS.mechanism, 2)]
    assert reports.sent(1).bytes_per_user == reports.shares * reports.bytes_per_report


@pytest.mark.parametrize(("fewer", "released"), [(1, 19), (11, 0)])
def test_an_aggregator_hands_over_one_sum_of_a_round_and_the_same_again(fewer, released):
    aggregation = aggregation_of(SHARED)
    send(aggregation, 1)
    asked, tags = aggregation.aggregators[0], aggregation.aggregators[1].tags(1)
    for wrong in (tags[: 10 * TAG_BYTES] * 2, tags + bytes(TAG_BYTES), tags[:-1]):
        with pytest.raises(ValueError, match="each once"):
            asked.close_round(1, wrong)
    first = asked.close_round(1, tags[fewer * TAG_BYTES :])
    with pytest.raises(ValueError, match="two of its sums"):
        asked.close_round(1, tags)
    # A server that lost the answer asks again.
    assert asked.close_round(1, asked.tags(1)) == first
    assert aggregation.close_round(1).num_reports == first.num_reports == released


@pytest.mark.parametrize("fewest", [10, None])
def test_an_aggregator_that_is_started_anew_says_no_second_sum_of_a_round(tmp_path, fewest):
    books = FileBook(tmp_path / "one"), FileBook(tmp_path / "other")
    reports = ReportFormat.of_settings({**PLAIN, "min_reports": fewest})
    before, anew = (aggregation_of(reports, books) for _ in range(2))
    for aggregation in (before, anew):  # a server opens the round again, and clients send again
        send(aggregation, 1)
    before.close_round(1)
    with pytest.raises(ValueError, match="round 1 was already answered"):
        anew.close_round(1)


def test_of_equal_tags_the_first_counts():
    """Nobody can remove another client's share from the sum by using its tag."""
    one = Aggregator(SHARED)
    one.open_round(1)
    shares = [SHARED.shares_of(SHARED.encode(1, torch.ones(3)))[0] for _ in range(11)]
    head = len(shares[0]) - SHARED.bytes_per_report
    shares[10] = shares[0][: head + TAG_BYTES] + shares[10][head + TAG_BYTES :]
    for client, share in enumerate(shares):
        one.submit(str(client), share)
    released = one.close_round(1, one.tags(1))
    assert released.num_reports == 10
    total = SHARED.sum_of(share[head + TAG_BYTES :] for share in shares[:10])
    assert released.mixed == total.tobytes()


def test_an_aggregator_that_counts_otherwise_than_the_others_is_refused():
    aggregation = aggregation_of(SHARED)
    send(aggregation, 1)
    first = aggregation.aggregators[0]
    close = first.close_round
    first.close_round = lambda *asked: close(*asked)._replace(num_reports=19)
    with pytest.raises(ValueError, match="another sum of round 1"):
        aggregation.close_round(1)


@pytest.mark.parametrize("lie", [-1, SHARED.bits * 5, SHARED.modulus // 2])
def test_a_client_that_lies_moves_the_sum_as_it_likes_or_has_the_round_dropped(lie):
    """Nobody can check the range of a share: it moves a sum by more than the bits that it has."""
    aggregation = aggregation_of(SHARED)
    total, report = send(aggregation, 1, 19).astype(int), SHARED.encode(1, None)
    lied = (lie - numbers_in(SHARED, report)[0].astype(int)).astype(SHARED.count_type).tobytes()
    aggregation.submit(report[: -len(lied)] + lied, sender="liar")
    if lie == SHARED.modulus // 2:
        with pytest.warns(UserWarning, match=r"round 1 is dropped: .* dishonest"):
            assert aggregation.close_round(1).dropped
    else:
        assert (np.frombuffer(aggregation.close_round(1).mixed, "<i8") == total + lie).all()


def test_aggregators_are_services_and_who_reaches_one_or_splits_anew_is_missing(tmp_path):
    named = [[f"{secret}-{place}" for secret in (*CLIENTS, SERVER)] for place in range(2)]
    services = [
        ShufflerService(
            Aggregator(SHARED, book=FileBook(tmp_path / secrets[-1])),
            clients=secrets[:-1],
            server=secrets[-1],
        ).start()
        for secrets in named
    ]
    *clients, server = (
        Aggregation(
            SHARED, [RemoteShuffler(services[0].url, one), RemoteShuffler(services[1].url, two)]
        )
        for one, two in zip(*named, strict=True)
    )

    def collect(number: int) -> None:
        for client in clients[:18]:
            client.submit(SHARED.encode(number, None))
        for client, place in ((18, 0), (18, 1), (19, 0)):
            share = SHARED.shares_of(SHARED.encode(number, None))[place]
            clients[client].aggregators[place].submit(share)

    ledger = ledger_of(SHARED, server)
    with services[0], services[1]:
        reports = [ledger.run(collect, lambda total: total).num_reports for _ in range(2)]
    assert (reports, ledger.report().simulated) == ([18, 18], False)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ReportFormat.of_settings({**PLAIN, "shares": 1}), "shares"),
        (lambda: Aggregator(SUMS), "format"),
        (lambda: Aggregator(SHARED, book="book.json"), "book"),
        (
            lambda: ShufflerService(Aggregator(SHARED), clients=CLIENTS, server=SERVER),
            "its book is in memory",
        ),
        (lambda: Shuffler(SHARED), "2 shares, each for an Aggregator"),
        (lambda: Shuffler(SHARED, is_shard=True), "2 shares, each for an Aggregator"),
        (lambda: Aggregation(SUMS, []), "format"),
        (lambda: Aggregation(SHARED, [Shuffler(SUMS)] * 2), "each of aggregators"),
        (lambda: Aggregation(SHARED, [Aggregator(SHARED)] * 2), "different addresses"),
        (lambda: Aggregation(THREE, [Aggregator(THREE), Aggregator(THREE)]), "must be 3"),
        (
            lambda: Aggregation(
                SHARED, [RemoteShuffler("http://localhost:9", secret) for secret in CLIENTS[:2]]
            ),
            "different addresses",
        ),
        (  # the one could report at the other in the name of everyone but its victim
            lambda: Aggregation(
                SHARED, [RemoteShuffler(f"http://localhost:{port}", CLIENTS[0]) for port in (8, 9)]
            ),
            "different secrets",
        ),
        (lambda: aggregation_of(SHARED).submit(SUMS.encode(1, None)), "all 2 shares"),
        (lambda: aggregation_of(SHARED).submit(SHARED.encode(1, None)), "sender must be a str"),
        (lambda: aggregation_of(SHARED).close_round(2), "round 2 is not open"),
        (lambda: ledger_of(SHARED, Aggregator(SHARED)), "shares need Aggregation"),
        (lambda: ledger_of(SUMS, aggregation_of(SHARED)), "1 shares, and shuffler is for 2"),
    ],
)
def test_what_would_give_one_party_all_shares_or_no_sum_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()
