"""Noise, participation and permutations come from the cipher; what can be drawn again is named."""

from __future__ import annotations

import functools
import json
import warnings

import pytest
import torch
from helpers.private_runs import OURS, Run, same
from helpers.toy import generator_here, here, make_toy
from torch.utils.data import DataLoader, Dataset

from opacus_shuffle import PrivacyEngine, find_permutations
from opacus_shuffle.core.randomness import SecretGenerator, is_secret

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DELTA = 1e-5
every_accountant = pytest.mark.parametrize("name", [*OURS, "gdp"])
NOT_PRIVATE = "not private: whoever knows"


@functools.cache
def spec():
    """What the small network moves: found once for all tests."""
    return find_permutations(make_toy()["module"], here(torch.zeros(2, 5)))


def seeded(name, seed, **options):
    """A run of a seeded engine on the same weights and data."""
    torch.manual_seed(0)
    engine = PrivacyEngine(accountant=name, seed=seed)
    return Run(name, engine=engine, **{"shuffle_weights": spec(), **options})


def report(run):
    return run.engine.privacy_report(DELTA)


# ---- secret by default ----------------------------------------------------------------------


@every_accountant
@pytest.mark.parametrize("secure", [True, False])
def test_noise_participation_and_permutations_are_drawn_from_the_cipher(name, secure, monkeypatch):
    engine = PrivacyEngine(accountant=name, secure_mode=secure)
    run = Run(name, engine=engine, shuffle_weights=spec())
    drawing = (run.optimizer.generator, run.loader.batch_sampler.generator)
    assert all(map(is_secret, drawing))
    assert run.optimizer.generator.secure is secure
    assert secure or len(set(map(id, drawing))) == 2

    def only_on_a_gpu(function, *shape, generator=None, **options):
        assert generator is run.optimizer.generator, "PyTorch's own generator was asked"
        assert generator.device.type != "cpu", "the generator was asked, not its cipher"
        return function(*shape, generator=generator, **options)

    before = run.weights()
    with monkeypatch.context() as patch:
        for name in ("normal", "rand", "randn", "randperm", "randint", "bernoulli"):
            draw = functools.partial(only_on_a_gpu, getattr(torch, name))
            patch.setattr(torch, name, draw)
        run.train()
    assert run.accounted == 4
    assert not any(torch.equal(value, before[key]) for key, value in run.weights().items())
    assert report(run).to_dict()["private"]


def test_a_secret_run_warns_of_nothing_and_two_share_nothing():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not private")
        with_own = Run("shuffled_checkin", loader={"generator": SecretGenerator()}).train()
    assert report(with_own).to_dict()["private"]
    secrets = []
    for _ in range(2):
        torch.manual_seed(7)  # with a flag of ours this is no seed of Opacus's accountants either
        run = Run("rdp", shuffle_weights=spec())
        streams = (run.optimizer.generator, run.loader.batch_sampler.generator)
        secrets += [
            *(int(stream.words(1)[0]) for stream in streams),
            run.engine.shuffler.state_dict()["key"],
        ]
    assert len(set(secrets)) == 6


# ---- seeds ----------------------------------------------------------------------------------


@every_accountant
def test_a_seed_repeats_sampling_noise_and_permutations_and_another_does_not(name):
    first, again, other = (seeded(name, seed).train() for seed in (0, 0, 1))
    weights = [run.weights() for run in (first, again, other)]
    # A second run of the engine has other noise than the first, and is repeatable too.
    for run in (first, again):
        torch.manual_seed(0)
        second = Run(name, engine=run.engine, shuffle_weights=spec())
        weights.append(second.train().weights())
    assert same(weights[0], weights[1])
    assert same(weights[3], weights[4])
    sorted_weights = {
        tuple(tensors["0.weight"].flatten().sort()[0].tolist()) for tensors in weights
    }
    assert len(sorted_weights) == 3


def test_noise_participation_and_permutations_of_a_seed_are_different_streams(monkeypatch):
    """Whoever sees the order of the weights must not know the noise: no word comes twice."""
    run = seeded("shuffled_checkin", 0)
    again = Run("shuffled_checkin", engine=run.engine, shuffle_weights=spec())
    words, draw = [], SecretGenerator.words

    def note(stream, count):
        drawn = draw(stream, count)
        words.append(tuple(drawn[:4].tolist()))
        return drawn

    monkeypatch.setattr(SecretGenerator, "words", note)
    for seeded_run in (run, again):
        seeded_run.optimizer.generator.words(4)
        seeded_run.loader.batch_sampler.generator.words(4)
    again.engine.shuffler.shuffle_()
    assert len(set(words)) == len(words) >= 5


class Augmented(Dataset):
    """Records that are other ones each time."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((5,), float(index)) + torch.rand(5), index % 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shuffled_checkin", {}),
        ("shuffle_gauss", {"poisson_sampling": False}),
        ("rdp", {"poisson_sampling": False}),
    ],
)
def test_a_seed_repeats_what_workers_draw_and_the_order_of_a_loader_of_one_s_own(
    name, options, workers
):
    def batches():
        own = DataLoader(Augmented(), batch_size=6, num_workers=workers, shuffle=True)
        run = seeded(name, 0, toy={"data_loader": own}, shuffle_weights=False, **options)
        assert own.generator is own.sampler.generator is None
        return torch.cat([x if workers else x.floor() for x, _ in run.loader])

    assert torch.equal(batches(), batches())


# ---- whatever can be drawn again is named ---------------------------------------------------


def assert_named(run, *names):
    """Report, dictionary and statement say that the run is not private, and by what."""
    answers = report(run).to_dict()
    assert (answers["private"], answers["predictable"]) == (False, list(names))
    for text in (str(report(run)), report(run).statement(), repr(report(run)), json.dumps(answers)):
        assert all(name in " ".join(text.split()) for name in names)
    assert "not private" in report(run).statement()


@pytest.mark.parametrize("name", ["shuffled_checkin", "gdp"])
def test_a_seed_says_once_that_the_run_is_not_private_and_a_checkpoint_does_not_forget_it(
    name, recwarn
):
    run = seeded(name, 0, shuffle_weights=False).train()
    assert len([warning for warning in recwarn if "not private" in str(warning.message)]) == 1
    for named in (run, Run(name).load(run.saved())):
        assert_named(named, "seed=0")


@pytest.mark.parametrize(
    ("which", "options"),
    [
        ("the generator of data_loader", {"loader": {"generator": torch.Generator()}}),
        ("noise_generator", {"noise_generator": generator_here()}),
    ],
)
def test_a_generator_that_the_user_passes_is_named_once(which, options):
    with pytest.warns(UserWarning, match=f"{NOT_PRIVATE} {which}"):
        run = Run("shuffled_checkin", **options)
    assert_named(run.train(), which)


AFTERWARDS = {
    "another generator": lambda run: setattr(run.optimizer, "generator", generator_here()),
    "PyTorch's own": lambda run: setattr(run.optimizer, "generator", None),
    "a seed": lambda run: run.optimizer.generator.manual_seed(0),
    "a state": lambda run: run.optimizer.generator.set_state(torch.Generator().get_state()),
    "a seed of the sampler": lambda run: run.loader.batch_sampler.generator.manual_seed(0),
    "another one of the sampler": lambda run: setattr(
        run.loader.batch_sampler, "generator", torch.Generator()
    ),
}


ACCOUNTANTS = "shuffled_checkin", "shuffled_sums", "subsampled_shuffle", "gdp", "gdp", "shuffled_fw"


@pytest.mark.parametrize(("change", "name"), [*zip(AFTERWARDS, ACCOUNTANTS, strict=True)])
def test_a_generator_that_is_no_secret_any_more_is_named_from_the_next_step_on(name, change):
    run = Run(name, shuffle_weights=spec()).train()
    assert report(run).to_dict()["private"] is True
    AFTERWARDS[change](run)
    with pytest.warns(UserWarning, match=NOT_PRIVATE) as told:
        run.train()
    assert len([warning for warning in told if "not private" in str(warning.message)]) == 1
    loader = "the generator of data_loader"
    assert_named(run, loader if "sampler" in change else "noise_generator")


def test_pytorch_s_own_noise_is_said_to_be_it_and_what_takes_its_place_is_named():
    run = Run("gdp").train()
    assert report(run).to_dict()["pytorch_noise"] is True
    run.optimizer.generator = generator_here()
    assert_named(run.train(), "noise_generator")
    own = Run("gdp", noise_generator=generator_here()).train()
    assert report(own).to_dict()["pytorch_noise"] is False


# ---- secure mode ----------------------------------------------------------------------------


def test_secure_mode_has_no_warning_of_being_off_and_takes_no_seed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = PrivacyEngine(accountant="rdp", secure_mode=True)
    with pytest.raises(ValueError, match="seed is prohibited in secure mode"):
        Run(engine=engine, noise_generator=torch.Generator())
