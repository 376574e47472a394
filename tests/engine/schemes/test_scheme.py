"""A scheme is found by its mechanism; ``make_private`` is a recipe that knows neither by name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap

import opacus
import pytest
from helpers.toy import make_toy, run_epoch

from opacus_shuffle import PrivacyEngine, WeightShuffling
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledCheckIn
from opacus_shuffle.engine.privacy_engine import ShuffleMixin
from opacus_shuffle.engine.schemes import Scheme, scheme_of
from opacus_shuffle.engine.training_plan import Request


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_has_a_scheme_of_its_own_family(name):
    scheme = scheme_of(PrivacyEngine(accountant=name))
    assert any(issubclass(MECHANISMS[name], kind) for kind in type(scheme).mechanisms)


def test_a_mechanism_derived_from_another_trains_as_that_one_does_and_a_stranger_is_refused():
    kind = dataclasses.make_dataclass(
        "Mine", [], bases=(ShuffledCheckIn,), frozen=True, kw_only=True
    )
    assert Scheme.of_mechanism(kind) is Scheme.of_mechanism(ShuffledCheckIn)
    with pytest.raises(
        ValueError, match=r"'shuffled_checkin' has no scheme to train by: derive one"
    ):
        Scheme.of_mechanism(type("Stranger", (), {"name": "shuffled_checkin"}))


def test_a_scheme_of_one_s_own_is_what_make_private_goes_by():
    went = []

    class Mine(Scheme.of_mechanism(ShuffledCheckIn)):
        mechanisms = ()  # and not for everyone

        def __getattribute__(self, verb):
            if verb in ("check", "describe", "sampler", "build_optimizer", "attach"):
                went.append(verb)
            return super().__getattribute__(verb)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Scheme._by_mechanism, ShuffledCheckIn, Mine)
        engine = PrivacyEngine(accountant="shuffled_checkin")
        run_epoch(*engine.make_private(**make_toy(), noise_multiplier=1.0))
    assert went == ["check", "describe", "sampler", "build_optimizer", "attach"]
    assert len(engine.accountant) == 4


def test_make_private_has_opacus_s_keywords_and_the_request_has_the_same_defaults():
    ours, theirs = (
        inspect.signature(each.make_private).parameters
        for each in (ShuffleMixin, opacus.PrivacyEngine)
    )
    assert set(theirs) - {"kwargs"} <= set(ours)
    asked = {
        each.name: each.default for each in dataclasses.fields(Request) if each.name != "others"
    }
    mine = {name: each.default for name, each in ours.items() if name not in ("self", "others")}
    assert asked.keys() == mine.keys()
    for name, default in mine.items():
        assert asked[name] == default or (
            default is inspect.Parameter.empty and asked[name] is dataclasses.MISSING
        )


def test_make_private_is_a_recipe():
    source = textwrap.dedent(inspect.getsource(ShuffleMixin.make_private))
    (function,) = ast.parse(source).body
    first, last = function.body[1], function.body[-1]  # after the docstring
    assert last.end_lineno - first.lineno < 60
    body = "\n".join(source.splitlines()[first.lineno - 1 : last.end_lineno])
    assert "isinstance" not in body
    assert not any(name in body for name in MECHANISMS)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WeightShuffling)])
def test_a_field_of_the_record_that_is_passed_as_a_keyword_is_shown_its_place(field):
    with pytest.raises(
        ValueError, match=rf"did you mean shuffle_weights=WeightShuffling\({field}=\.\.\.\)"
    ):
        PrivacyEngine(accountant="rdp").make_private(
            **make_toy(), noise_multiplier=1.0, **{field: None}
        )
    with pytest.raises(
        TypeError, match="WeightShuffling"
    ):  # Python's own word for an unknown keyword, too
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            **make_toy(), target_epsilon=1.0, target_delta=1e-5, epochs=1, **{field: None}
        )


def test_a_record_says_the_same_as_its_short_forms():
    def spec(shuffle_weights):
        engine = PrivacyEngine(accountant="rdp")
        engine.make_private(**make_toy(), noise_multiplier=1.0, shuffle_weights=shuffle_weights)
        return engine.shuffler.spec.to_dict()

    assert spec(True) == spec(WeightShuffling()) == spec("residual")
    assert WeightShuffling.of(False).given() == {}
