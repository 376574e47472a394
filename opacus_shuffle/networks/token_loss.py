"""The loss of each record's tokens."""

from __future__ import annotations

import torch
from torch.nn import functional


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, shift: bool = True, ignore_index: int = -100
) -> torch.Tensor:
    """Returns each record's own mean cross-entropy over its labelled tokens.

    The loss of a language model in ``transformers`` is a mean over all tokens of the batch, so that
    one record's labels rescale the gradients of all others. The mean of ``token_loss`` over records
    gives every record the same weight, independently of all others. This is what clipping needs.

    Args:
        logits: Scores of shape ``[records, tokens, classes]``.
        labels: Classes of shape ``[records, tokens]``.
        shift: Whether the scores at a token predict the label of the next one, as in causal
            language models. Use ``False`` for token classification and masked language models.
        ignore_index: The label of tokens that do not count.

    Returns:
        Losses of shape ``[records]``; 0 for a record without a label that counts.

    Raises:
        ValueError: The shapes do not match.

    >>> logits = torch.zeros(2, 4, 10)
    >>> labels = torch.tensor([[3, 1, 4, 1], [-100, -100, -100, 5]])
    >>> token_loss(logits, labels)
    tensor([2.3026, 2.3026])

    In a training loop the labels go to the loss and not to the model::

        labels = batch.pop("labels")
        loss = opacus_shuffle.token_loss(model(**batch).logits, labels).mean()
    """
    if logits.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ValueError(
            "labels must have the shape [records, tokens] of logits [records, tokens, classes], "
            f"got labels with {labels.dim()} and logits with {logits.dim()} dimensions: pass both "
            "before flattening"
        )
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(
        logits.movedim(-1, 1), labels, ignore_index=ignore_index, reduction="none"
    )
    return losses.sum(1) / (labels != ignore_index).sum(1).clamp(min=1)
