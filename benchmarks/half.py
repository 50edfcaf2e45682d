"""How long is a training step in half precision beside the same step in float32?

Knows the models and how to time them in turn in one process. Prints a table; changes nothing.

usage: python benchmarks/half.py [--dtype float16 --dtype bfloat16] [--pairs N] [--model NAME ...] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional

from lucid.amp import autocast

Step = Callable[[AbstractContextManager[object]], None]


def _step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    """One forward in the given scope, one backward outside it; the gradients are cleared."""

    def step(scope: AbstractContextManager[object]) -> None:
        model.zero_grad()
        with scope:
            loss = loss_of()
        loss.backward()

    return step


class Block(nn.Module):
    """A transformer block as written by hand: attention and a feed-forward net, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norms[1](x))


def transformer() -> Step:
    """Three blocks, 128 wide, 16 sequences of 64 tokens."""
    model = nn.Sequential(*(Block(128, 4) for _ in range(3)))
    x = torch.randn(16, 64, 128)
    return _step(model, lambda: model(x).float().square().mean())


def encoder() -> Step:
    """``nn.TransformerEncoder``: three layers, 128 wide, 16 sequences of 64 tokens, without dropout."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3)
    x = torch.randn(16, 64, 128)
    return _step(model, lambda: model(x).float().square().mean())


def _cnn(channels: int, size: int, batch: int) -> Step:
    model = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    x = torch.randn(batch, channels, size, size)
    return _step(model, lambda: model(x).float().square().mean())


def cnn_digits() -> Step:
    """Two convolutions on 1×8×8, batch 128."""
    return _cnn(1, 8, 128)


def cnn_64() -> Step:
    """Two convolutions on 3×64×64, batch 16."""
    return _cnn(3, 64, 16)


def mlp() -> Step:
    """256-512-256, batch 128."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    x = torch.randn(128, 256)
    return _step(model, lambda: model(x).float().square().mean())


def lstm() -> Step:
    """Two layers of 128 on 32 steps, batch 32."""
    model = nn.LSTM(64, 128, 2)
    x = torch.randn(32, 32, 64)
    return _step(model, lambda: model(x)[0].float().square().mean())


def gpt2() -> Step:
    """GPT-2 of ``transformers``, two layers, 128 wide, 1000 tokens known, 8 sequences of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 1000, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 1000, (8, 64))
    return _step(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def vit() -> Step:
    """ViT of ``transformers``, two layers, 128 wide, 3×64×64 in patches of 8, batch 8."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    model = ViTForImageClassification(config).train()
    pixels, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    return _step(model, lambda: model(pixel_values=pixels, labels=labels).loss)


MODELS: dict[str, Callable[[], Step]] = {
    f.__name__: f for f in (transformer, encoder, cnn_digits, cnn_64, mlp, lstm, gpt2, vit)
}


def _seconds(step: Step, scope: AbstractContextManager[object]) -> float:
    start = time.perf_counter()
    step(scope)
    return time.perf_counter() - start


def _native(dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype)


def _ours(dtype: torch.dtype) -> AbstractContextManager[object]:
    return autocast("cpu", dtype)


def measure(name: str, dtype: torch.dtype, pairs: int) -> dict[str, float | str]:
    """Time one model: float32, PyTorch's autocast and ours in turn; medians of the ratios of neighbours."""
    torch.manual_seed(0)
    step = MODELS[name]()
    plain: list[float] = []
    native: list[float] = []
    ours: list[float] = []
    runs_natively = True
    for place in range(pairs + 2):
        times = [_seconds(step, contextlib.nullcontext()), _seconds(step, _ours(dtype))]
        # The slow one less often: its ratio is large enough to be seen in few.
        if runs_natively and place % 5 == 0:
            try:
                native.append(_seconds(step, _native(dtype)) / times[0])
            except RuntimeError:
                runs_natively = False
        if place >= 2:
            plain.append(times[0])
            ours.append(times[1] / times[0])
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "float32_ms": 1e3 * statistics.median(plain),
        "torch_autocast": statistics.median(native[1:] or native) if runs_natively else float("nan"),
        "lucid_autocast": statistics.median(ours),
    }


def main() -> None:
    """Read the arguments, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=("float16", "bfloat16"))
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    models = list(given.model or MODELS)
    if importlib.util.find_spec("transformers") is None and {"gpt2", "vit"} & set(models):
        parser.exit(2, "gpt2 and vit need transformers: pip install transformers, or name other models with --model\n")
    dtypes = [getattr(torch, name) for name in given.dtype or ("float16", "bfloat16")]
    for dtype in dtypes:
        print(f"{dtype}: {autocast('cpu', dtype).arithmetic_by_kind}")
    print("| model | dtype | float32, ms | torch.autocast / float32 | lucid.amp.autocast / float32 |")
    print("|---|---|---|---|---|")
    rows = []
    for name in models:
        for dtype in dtypes:
            row = measure(name, dtype, given.pairs)
            rows.append(row)
            times = "{float32_ms:.1f} | {torch_autocast:.2f} | {lucid_autocast:.2f}".format(**row)
            print(f"| {row['model']} | {row['dtype']} | {times} |", flush=True)
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
