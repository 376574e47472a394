"""Other records of a batch do not affect a record, by ignored labels or by padding."""

from __future__ import annotations

import pytest
import torch
from helpers.private_runs import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

from opacus_shuffle import token_loss
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

TOKENS = 6
MIXES = "returns a loss of the batch that is not a sum.*token_loss|criterion mixes records"


def of_batch(logits, labels):
    """A mean over the tokens of all records, as the losses of ``transformers`` are."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Language(nn.Module):
    """Takes optional labels, as models of ``transformers`` do."""

    def __init__(self, loss):
        super().__init__()
        self.words, self.head, self.loss = nn.Embedding(9, 4), nn.Linear(4, 9), loss

    def forward(self, words, labels=None):
        logits = self.head(F.dropout(self.words(words), 0.1))
        return {"logits": logits} | ({} if labels is None else {"loss": self.loss(logits, labels)})


def sentences(ignored):
    """Sixty sentences, in which so many first tokens do not count."""
    for place in range(60):
        words = torch.randint(9, (TOKENS,))
        labels = torch.where(torch.arange(TOKENS) < ignored(place), -100, words)
        yield {"words": words, "labels": labels}


RAGGED = {"all": lambda i: i % 5, "late": lambda i: i % 5 if i > 9 else 0, "none": lambda i: 0}


@pytest.mark.parametrize("loss", [of_batch, lambda *pair: token_loss(*pair).mean()])
@pytest.mark.parametrize("ragged", RAGGED)
def test_a_network_s_loss_may_divide_by_labels_only_where_all_records_have_as_many(ragged, loss):
    data = DataLoader([*sentences(RAGGED[ragged])], batch_size=20)
    run = Run(toy={"module": Language(loss), "data_loader": data})

    def train():
        for batch in run.loader:
            run.model(**batch)["loss"].backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    if loss is of_batch and ragged != "none":
        with pytest.raises(ValueError, match=MIXES):
            train()
        assert run.accounted == 0
    else:
        train()
    for batch in run.loader:  # the network does not see the loop's own loss
        labels = batch.pop("labels")
        token_loss(run.model(**batch)["logits"], labels).mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def contrastive(outputs, _):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def focal(outputs, targets):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 2.0]))


def one_hot(loss):
    return lambda outputs, targets: loss(outputs, F.one_hot(targets, 3).float())


CRITERIA = {
    contrastive: True,
    weighted: True,
    focal: False,
    nn.CrossEntropyLoss(label_smoothing=0.1): False,
    one_hot(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([9.0, 1.0, 1.0]))): False,
    one_hot(nn.MSELoss()): False,
}
"""Whether they mix records."""


@pytest.mark.parametrize(
    ("criterion", "mode"),
    [
        (criterion, mode)
        for criterion in CRITERIA
        for mode in ("hooks", "ew", "ghost")
        if mode != "ghost" or isinstance(criterion, nn.Module)  # which has a reduction
    ],
)
def test_a_criterion_is_checked_in_every_mode(criterion, mode):
    if CRITERIA[criterion]:
        with pytest.raises(ValueError, match=MIXES):
            Run(mode=mode, criterion=criterion)
    else:
        assert Run(mode=mode, criterion=criterion).train().accounted


def test_a_sum_and_a_criterion_of_tokens_are_checked_and_what_cannot_be_is_warned_of():
    data = DataLoader([*sentences(RAGGED["all"])], batch_size=20)
    toy = {"module": Language(of_batch), "data_loader": data}
    with pytest.raises(ValueError, match=MIXES):
        Run(toy=toy, criterion=lambda outputs, labels: of_batch(outputs["logits"], labels))
    Run(toy=toy, criterion=lambda outputs, labels: token_loss(outputs["logits"], labels))
    tags = [tuple(sentence.values()) for sentence in sentences(RAGGED["all"])]
    with pytest.warns(PrivacyAssumptionWarning, match="yields labels of -100, and no criterion"):
        Run(toy={"module": nn.Embedding(9, 9), "data_loader": DataLoader(tags, batch_size=20)})
    Run(criterion=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
    with pytest.warns(PrivacyAssumptionWarning, match="criterion was not checked"):
        Run(criterion=lambda outputs: outputs.sum())


class Reads(nn.Module):
    """Computes scores of sequences [records, time, 5] from what ``read`` takes of them."""

    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(5, 3), read

    def forward(self, x, lengths):
        return self.read(torch.tanh(self.layer(x)), lengths)


def by_length(rows):
    """Pads with the longest record first, as packing requires."""
    return padded(sorted(rows, key=lambda row: -len(row[0])))


def padded(rows, **options):
    x, y = zip(*rows, strict=True)
    return pad_sequence(x, True, **options), torch.tensor([*map(len, x)]), torch.tensor(y)


def constant(rows):
    x, *others = padded(rows)
    return F.pad(x, (0, 0, 0, 9 - x.shape[1])), *others


def random(rows):
    x, *others = padded(rows)
    return x + torch.randn_like(x), *others


def within(hidden, lengths):
    real = torch.arange(hidden.shape[1]) < lengths[:, None]
    return (hidden * real[..., None]).sum(1) / lengths[:, None].clamp(min=1)


READS = {
    "mean": lambda hidden, _: hidden.mean(1),
    "last": lambda hidden, _: hidden[:, -1],
    "own mean": within,
    "own last": lambda hidden, lengths: hidden[torch.arange(len(hidden)), lengths - 1],
    "tokens": lambda hidden, _: hidden,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    "collate", [padded, by_length, lambda rows: padded(rows, padding_side="left"), constant, random]
)
def test_networks_that_read_the_padding_of_other_records_are_refused(read, collate):
    lengths = [4 + place % 5 for place in range(24)]
    rows = [(torch.randn(length, 5), length % 3) for length in lengths]
    loader = DataLoader(rows, batch_size=6, collate_fn=collate)
    toy = {"module": Reads(READS[read]), "data_loader": loader}
    if read in ("mean", "last") and collate in (padded, by_length):
        with pytest.raises(ValueError, match="module reads the padding of data_loader's collate"):
            Run(toy=toy)
    elif collate in (padded, by_length, constant, random) or read == "tokens":
        assert Run(toy=toy)


class Masked(nn.Module):
    """Takes an optional mask."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x, lengths=None):
        return (READS["mean"] if lengths is None else within)(self.layer(x), lengths)


def sounds(rows):
    """Pads the last axis of [channels, time]."""
    x, *others = padded([(sound.t(), label) for sound, label in rows])
    return x.movedim(1, 2), others[-1]


def test_padding_of_any_axis_is_looked_at_and_an_optional_mask_in_a_tuple_is_one():
    lengths = [4 + place % 5 for place in range(24)]
    rows = [(torch.randn(length, 5), length % 3) for length in lengths]
    Run(toy={"module": Masked(), "data_loader": DataLoader(rows, 6, collate_fn=padded)})
    pooled = nn.Sequential(nn.Conv1d(5, 3, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    rows = [(sound.t(), label) for sound, label in rows]
    toy = {"module": pooled, "data_loader": DataLoader(rows, 6, collate_fn=sounds)}
    with pytest.raises(ValueError, match="module reads the padding of data_loader's collate"):
        Run(toy=toy)


def mixup(rows):
    x, y = default_collate(rows)
    order, share = torch.randperm(len(x)), torch.rand(())
    return share * x + (1 - share) * x[order], y


def centred(rows):
    x, y = default_collate(rows)
    return x - x.mean(0), y


def augmented(rows):
    x, y = default_collate(rows)
    return x + torch.randn_like(x), y


@pytest.mark.parametrize("collate", [mixup, centred, augmented, default_collate])
def test_a_collate_function_that_mixes_records_is_refused(collate):
    if collate in (mixup, centred):
        with pytest.raises(ValueError, match="collate_fn mixes records"):
            Run(loader={"collate_fn": collate})
    else:
        assert Run(loader={"collate_fn": collate}).train().accounted
