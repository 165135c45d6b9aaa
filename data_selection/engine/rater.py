"""A causal LM as scorers ask it: losses of chosen tokens, and what comes next. Logits are never kept.

Legend: B rows, T tokens of the longest row, N positions that are read, D model width, V vocabulary, K tokens
of interest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from finetune.core.errors import CapabilityError
from finetune.data.render import IGNORED
from finetune.data_selection.engine.failures import UnscorableError
from finetune.models.batches import padded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.data_selection.engine.trees import TokenTree

__all__ = ["CHUNK", "Loss", "NextTokens", "Rater", "TargetRow"]

CHUNK = 256
"""Positions whose logits exist at a time."""


@dataclass(frozen=True)
class TargetRow:
    """Token ids, and the same ids as labels with -100 where a token is not scored."""

    input_ids: Sequence[int]
    labels: Sequence[int]


@dataclass(frozen=True)
class Loss:
    """Negative log-likelihood of some tokens.

    Attributes:
        total: The sum, in nats.
        tokens: How many tokens it is over.
    """

    total: float
    tokens: int

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.total + other.total, self.tokens + other.tokens)


@dataclass(frozen=True)
class NextTokens:
    """What comes next.

    Attributes:
        log_probabilities: (N, K) float32, of the tokens that were asked for.
        likeliest: (N,) int64, the likeliest token of all.
    """

    log_probabilities: Tensor
    likeliest: Tensor


class Rater:
    """A model and its tokenizer.

    Memory beside the weights is that of the hidden states and of :data:`CHUNK` rows of logits, whatever the length of
    the rows: only positions that are read reach the output head.

    Args:
        model: A causal LM, in evaluation mode, on its device.
        tokenizer: Its tokenizer.
        name: What the model is called.

    Raises:
        CapabilityError: The hidden states of the model cannot be turned into its logits.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "") -> None:
        self.model = cast(Any, model)
        self.tokenizer, self.name = tokenizer, name
        self.model.eval()  # no dropout
        self.device = next(model.parameters()).device
        self.context: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self._body: Any = self.model.base_model
        self._head: Any = self.model.get_output_embeddings()
        self._head_is_all = self._probe_head()

    @property
    def start(self) -> list[int]:
        """What stands before a text without context: BOS, else EOS, else nothing."""
        first = self.tokenizer.bos_token_id
        first = self.tokenizer.eos_token_id if first is None else first
        return [] if first is None else [int(first)]

    def losses(self, rows: Sequence[TargetRow]) -> list[Loss]:
        """Returns the loss of each row's labelled tokens; the first token of a row has no context and is left out.

        Log-probabilities are float32, sums float64.
        """
        import torch
        import torch.nn.functional as F

        hidden_BTD = self._hidden([row.input_ids for row in rows])
        labels_BT, _ = padded([row.labels for row in rows], IGNORED, "right", self.device)
        places = (labels_BT[:, 1:] != IGNORED).nonzero()
        sums = torch.zeros(len(rows), dtype=torch.float64)
        with torch.inference_mode():
            for chunk in torch.split(places, CHUNK):
                row, position = chunk.unbind(1)
                logits = self.logits(hidden_BTD[row, position]).float()
                losses = F.cross_entropy(logits, labels_BT[row, position + 1], reduction="none")
                sums.index_add_(0, row.cpu(), losses.double().cpu())
        counts = torch.bincount(places[:, 0].cpu(), minlength=len(rows))
        return [Loss(*pair) for pair in zip(sums.tolist(), counts.tolist(), strict=True)]

    def last_hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the final hidden state of each row's last token.

        Shape:
            (B, D) in the model's dtype.
        """
        import torch

        hidden_BTD = self._hidden(rows)
        ends = torch.tensor([len(row) - 1 for row in rows], device=self.device)
        return hidden_BTD[torch.arange(len(rows), device=self.device), ends]

    def hidden_states(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns the final hidden states of each row, (its tokens, D) in the model's dtype."""
        return [hidden[: len(row)] for hidden, row in zip(self._hidden(rows), rows, strict=True)]

    def last_hidden_of_trees(self, trees: Sequence[TokenTree]) -> Tensor:
        """Returns the final hidden state of each branch's last token, tree by tree; trunks are computed once.

        Shape:
            (branches of all trees, D) in the model's dtype.
        """
        import torch

        from finetune.data_selection.engine.trees import tree_batch

        for tree in trees:
            self._check_length(len(tree.trunk) + max(map(len, tree.branches)))
        batch = tree_batch(trees, self.model.dtype, self.device)
        inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "attention_mask": batch.mask}
        with torch.inference_mode():
            hidden_BTD = self._body(**inputs, use_cache=False).last_hidden_state
        ends: Tensor = hidden_BTD[batch.end_rows, batch.end_positions]
        return ends

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Returns the logits of hidden states, (N, V) in the model's dtype."""
        import torch

        with torch.inference_mode():
            return self._head(hidden_ND) if self._head_is_all else self._through_whole_model(hidden_ND)

    def next_tokens(self, hidden_ND: Tensor, tokens_K: Sequence[int]) -> NextTokens:
        """Returns how likely some tokens come next, among the whole vocabulary."""
        import torch

        index = torch.tensor(list(tokens_K), device=self.device)
        normalisers, likeliest = [], []
        with torch.inference_mode():
            for chunk in torch.split(hidden_ND, CHUNK):
                logits = self.logits(chunk).float()
                normalisers.append(logits.logsumexp(-1))
                likeliest.append(logits.argmax(-1))
            if self._head_is_all:
                # A few rows of the head in float32: in bfloat16 the steps between logits are an eighth.
                bias = getattr(self._head, "bias", None)
                chosen = hidden_ND.float() @ self._head.weight[index].float().T
                chosen = chosen if bias is None else chosen + bias[index].float()
            else:
                chosen = torch.cat([self.logits(chunk)[:, index].float() for chunk in torch.split(hidden_ND, CHUNK)])
            return NextTokens(chosen - torch.cat(normalisers)[:, None], torch.cat(likeliest))

    def _hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns (B, T, D); a causal model does not look at what pads a row on the right, so there is no mask."""
        import torch

        self._check_length(max(map(len, rows)))
        ids_BT, _ = padded(rows, 0, "right", self.device)
        with torch.inference_mode():
            hidden: Tensor = self._body(input_ids=ids_BT, use_cache=False).last_hidden_state
            return hidden

    def _check_length(self, tokens: int) -> None:
        if self.context is not None and tokens > self.context:
            raise UnscorableError("longer than the model's context", f"{tokens} tokens, {self.context} at most")

    def _probe_head(self) -> bool:
        """Returns whether the output head alone makes the logits; some models scale or cap them after it."""
        import torch

        ids = torch.arange(8, device=self.device)[None] % self.model.config.get_text_config().vocab_size
        with torch.inference_mode():
            expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
            hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state[0]
            if torch.allclose(self._head(hidden).float(), expected, rtol=1e-3, atol=1e-3):
                return True
            if torch.allclose(self._through_whole_model(hidden).float(), expected, rtol=1e-3, atol=1e-3):
                return False
        raise CapabilityError(
            "the model makes its logits in a way of its own, so they cannot be read position by position",
            where="model.name_or_path",
            got=f"{self.name} ({type(self.model).__name__})",
            want="a causal LM whose last hidden states go through its output head",
        )

    def _through_whole_model(self, hidden_ND: Tensor) -> Tensor:
        """Has the model itself make logits of our hidden states: they take the place of its body's own."""
        import torch

        def replace(module: Any, arguments: Any, output: Any) -> Any:
            output.last_hidden_state = hidden_ND[None]
            return output

        hook = self._body.register_forward_hook(replace)
        try:
            logits: Tensor = self.model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device)).logits
            return logits[0]
        finally:
            hook.remove()
