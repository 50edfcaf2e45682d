"""A character transformer; a batch with a NaN must not disturb the dropout that follows."""

import sys

import torch
from torch import nn


class Model(nn.Module):
    """Embedding, two encoder layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 30)

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits for the next character at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens) * weight, mask=mask, is_causal=True))


torch.manual_seed(6)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=4)
for step in range(10):
    tokens = torch.randint(30, (4, 9))
    weight = torch.full((1,), float("nan") if step == 5 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = model(tokens[:, :-1], weight=weight)
        loss = nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
