"""Trains privately with Hugging Face's Trainer (the extras ``transformers`` and ``accelerate``).

``docs/how_to/hugging_face_trainer.rst`` has an example.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.data import DataLoader

from opacus_shuffle.core import imports
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.integrations.epoch_budget import EpochBudget, check_settings
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.token_loss import token_loss

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ImportError(
        imports.missing_extra(
            "opacus_shuffle.integrations.hugging_face", "transformers", "transformers"
        )
    ) from error

REQUIRED = {
    "gradient_accumulation_steps": 1,
    "label_smoothing_factor": 0,  # whose mean is over labels, of which records have various numbers
    "max_grad_norm": 0,
    "save_strategy": "no",
    "include_num_input_tokens_seen": "no",  # which counts the records that were drawn
    "parallel_mode": ParallelMode.NOT_PARALLEL,
}
"""What the arguments of a private run's training have to be, attribute by attribute."""

RAW = ("loss", "train_loss", "grad_norm", "total_flos")
"""What a trainer logs of private records without noise."""


class PrivateTrainer(transformers.Trainer):
    """A trainer on what ``make_private`` returned, which logs ``epsilon`` in the place of losses.

    It takes the very steps that a loop of your own takes. Losses of private batches, norms of
    their gradients and the work that they took are releases without noise: they are left out of
    what is logged (not of what ``train()`` returns).

    Args:
        model: Of ``make_private``.
        args: The ``transformers.TrainingArguments``.
        engine: The engine that has made the model private.
        data_loader: That of ``make_private``, which is taken as it is: nothing replaces its
            sampler.
        delta: δ in (0, 1).
        target_epsilon: ε to stay within: training stops before an epoch with which ε would be above
            it. By default it stops as it would anyway.
        **keywords: Others of ``transformers.Trainer``; ``optimizers`` begins with the optimizer of
            ``make_private``.

    Raises:
        ValueError: If an argument is out of range, or the training arguments accumulate or clip
            gradients, smooth labels, count tokens, write checkpoints, or are for several processes
            or GPUs. ``train()`` is refused before its first step if it would resume a checkpoint,
            or not even one epoch is within the target.
    """

    def __init__(
        self,
        model: Any,
        args: transformers.TrainingArguments,
        *,
        engine: PrivacyEngine,
        data_loader: DataLoader,
        delta: float,
        target_epsilon: float | None = None,
        **keywords: Any,
    ) -> None:
        # Older versions say False or None for what is off.
        settings = {name: (getattr(args, name) or value, value) for name, value in REQUIRED.items()}
        check_settings("TrainingArguments", settings)
        super().__init__(model, args, **keywords)
        self.budget = EpochBudget(engine, delta=delta, target_epsilon=target_epsilon)
        self.private_loader = data_loader
        # The forward method of a private model names no columns, so all would be dropped.
        self.args.remove_unused_columns = False
        self.add_callback(BudgetCallback(self.budget))

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Trains, from the weights that the model has.

        Raises:
            ValueError: If a checkpoint is to be resumed, or not even one epoch is within the
                target.
        """
        check_settings(
            "train()", {"resume_from_checkpoint": (resume_from_checkpoint or None, None)}
        )
        return super().train(None, trial, ignore_keys_for_eval)

    def _save_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses the trainer's checkpoints, which a callback may ask for, too.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a checkpoint of the trainer holds weights and not what they cost: call "
            "engine.save_checkpoint(path=..., module=..., optimizer=...)"
        )

    def get_train_dataloader(self) -> DataLoader:
        """Returns the private loader, in which Accelerate would put another sampler."""
        return self.private_loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Computes the gradients of one batch's records.

        The number of items is not handed on. A loss that divides by what a batch holds lets one
        record rescale the gradients of others.
        """
        self.budget.optimizer.zero_grad()  # the trainer clears the model's gradients alone
        return super().training_step(model, inputs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any
    ) -> Any:
        """Computes a mean over records of each record's own loss.

        In training, the loss of models with a label for each token is the mean of
        :func:`~opacus_shuffle.networks.token_loss.token_loss`. All other models compute their own
        loss, which is checked. Your own ``compute_loss_func`` must return such a mean.
        """
        labels, network = inputs.get("labels"), unwrap(model)
        network = getattr(network, "get_base_model", lambda: network)()
        tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
        # An encoder-decoder model makes the inputs of its decoder from the labels.
        encodes = getattr(getattr(network, "config", None), "is_encoder_decoder", False)
        own_loss = encodes or getattr(self, "compute_loss_func", None) is not None
        if own_loss or not tokens or not model.training:
            return super().compute_loss(model, inputs, return_outputs, **keywords)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        shift = type(network).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        loss = token_loss(outputs["logits"], labels, shift=shift).mean()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Logs ε, and nothing that was computed from private records without noise."""
        kept = {name: value for name, value in logs.items() if name not in RAW}
        super().log({**kept, "epsilon": self.budget.spent}, *arguments, **keywords)


class BudgetCallback(transformers.TrainerCallback):
    """Asks the budget before each epoch; ``PrivateTrainer`` brings it along."""

    def __init__(self, budget: EpochBudget) -> None:
        self.budget = budget

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, train_dataloader: Any, **_: Any
    ) -> None:
        """Refuses a run of which not even one epoch fits."""
        self.budget.start(model, train_dataloader)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops where the next epoch does not fit."""
        control.should_training_stop = (
            control.should_training_stop or not self.budget.allows_epoch()
        )
