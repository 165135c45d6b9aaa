"""The lean loss equals the stock loss, for plain, scaled, adapted and 16-bit heads, and holds few logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import finetune
from finetune.core.errors import FinetuneWarning
from finetune.training.loss import CHUNK, LeanLoss, linear_cross_entropy
from support.tiny import tiny_gemma2, tiny_gpt2, tiny_llama, token_batch


def lora_on_head() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(tied=False), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    return model.eval()


def past_the_hooks() -> Any:
    """Returns a model whose tuner calls the forward of the model within itself."""
    return finetune.method("adaption_prompt", adapter_len=4).attach(tiny_llama()).eval()


def with_other_labels() -> Any:
    """Returns a model that lengthens rows and labels before the model within sees them."""
    return finetune.method("prompt_tuning").attach(tiny_llama()).eval()


def batch(rows: int = 4, length: int = 100) -> dict[str, torch.Tensor]:
    ids = token_batch(rows, length)
    labels = ids.clone()
    labels[:, :20] = -100
    labels[0] = -100
    labels[1, 50:] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("build", "form"),
    [
        (tiny_llama, "chunked"),
        (tiny_gpt2, "chunked"),
        (tiny_gemma2, "selected"),
        (lora_on_head, "selected"),
        (past_the_hooks, "chunked"),
        (with_other_labels, "chunked"),
    ],
)
@pytest.mark.parametrize("items", [None, torch.tensor(77)])
def test_loss_and_gradients_equal_the_stock_ones(build: Any, form: str, items: Any) -> None:
    model, inputs = build(), batch()
    assert int((inputs["labels"] != -100).sum()) > 0
    stock, expected = loss_and_gradients(model, **inputs, num_items_in_batch=items)
    lean = LeanLoss(model)
    found, gradients = loss_and_gradients(model, **inputs, num_items_in_batch=items)
    assert lean.form == form
    torch.testing.assert_close(found, stock, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_without_labels_and_after_removal_the_model_is_its_own() -> None:
    model, ids = tiny_llama(), token_batch()
    expected = model(input_ids=ids).logits
    lean = LeanLoss(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert model(input_ids=ids, labels=ids).logits.shape[-1] == 32  # hidden states, not logits
    lean.remove()
    assert torch.equal(model(input_ids=ids, labels=ids).logits, expected)


def test_a_failing_forward_leaves_no_labels_behind() -> None:
    model, ids = tiny_llama(), token_batch()
    expected = model(input_ids=ids).logits
    LeanLoss(model)
    with pytest.raises(Exception, match=r"shape|size|broadcast"):
        model(input_ids=ids, labels=ids[:, :3])
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_no_tensor_as_large_as_all_logits_is_ever_made() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    Largest.size = max(Largest.size, tensor.numel())
            return out

    hidden = torch.randn(4 * CHUNK, 8, requires_grad=True)
    weight, target = torch.randn(5000, 8), torch.randint(5000, (4 * CHUNK,))
    with Largest():
        linear_cross_entropy(hidden, weight, None, target).backward()
    assert Largest.size <= CHUNK * 5000
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), target, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(hidden.grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_model_with_a_loss_of_its_own_is_left_alone_with_a_warning() -> None:
    class Odd(type(tiny_llama())):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = None if labels is None else output.logits.square().mean()
            return output

    model = tiny_llama()
    model.__class__ = Odd
    with pytest.warns(FinetuneWarning, match="held in memory"):
        lean = LeanLoss(model)
    assert lean.form == "stock"
