"""Rehearse float16 training on Metal, where half-precision subnormals become zero, on any processor.

A two-layer character transformer learns from the descriptions of scikit-learn's datasets: in float32, in float16
without loss scaling, and with it. usage: python examples/rehearse_metal.py [steps]
"""

import contextlib
import importlib.resources
import sys

import torch
from torch import nn

from lucid.amp import GradScaler, autocast

files = sorted(importlib.resources.files("sklearn.datasets.descr").iterdir(), key=str)
text = "".join(file.read_text("utf8") for file in files if file.name.endswith(".rst"))
symbols = {symbol: place for place, symbol in enumerate(sorted(set(text)))}
data = torch.tensor([symbols[c] for c in text])
train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
WIDTH, LENGTH, BATCH = 32, 32, 256
HIDDEN = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class Model(nn.Module):
    """Maps characters (batch, LENGTH) to the next one's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(len(symbols), WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(symbols))

    def loss(self, source: torch.Tensor, scope: autocast | contextlib.nullcontext) -> torch.Tensor:
        """The mean cross-entropy of a random batch, its forward in the scope."""
        start = torch.randint(len(source) - LENGTH - 1, (BATCH, 1)) + torch.arange(LENGTH)
        with scope:
            given = self.symbols(source[start]) + self.places.weight
            out = self.head(self.body(given, mask=HIDDEN, is_causal=True))
        return nn.functional.cross_entropy(out.float().flatten(0, 1), source[start + 1].flatten())


metal = autocast("cpu", torch.float16, flush_subnormals=True)
ways = {"float32": (contextlib.nullcontext(), False), "float16 alone": (metal, False), "float16 scaled": (metal, True)}
for name, (scope, scaled) in ways.items():
    torch.manual_seed(0)
    model, scaler = Model(), GradScaler(enabled=scaled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model.loss(train, scope)).backward()
        zero = torch.cat([p.grad.flatten() == 0 for p in model.body.parameters() if p.dim() > 1])
        scaler.step(optimizer)
        scaler.update()
    loss = model.loss(held_out, scope).item()
    print(f"{name:14}  zero gradients {zero.float().mean():6.1%}  validation loss {loss:.3f}", flush=True)
