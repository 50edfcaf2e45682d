"""Resume a float16 run from a checkpoint, under the specification's names: it goes on as if it had never stopped.

The scaler is saved beside the model and the optimizer. Without it the resumed run would begin at the first scale
again, and skip steps on its way back to the scale that it had found.
"""

import tempfile
from pathlib import Path

import lucid
from lucid import nn, optim
from lucid.amp import GradScaler, autocast


class Run:
    """All that a training consists of."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to("metal")
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = GradScaler(init_scale=2.0**24, growth_interval=10)

    def train(self, steps: range) -> float:
        """Train on one batch a step, which the step's number makes; return the last loss."""
        for step in steps:
            lucid.manual_seed(step)
            x = lucid.randn(64, 8, device="metal")
            self.optimizer.zero_grad()
            with autocast():
                out = self.model(x)
            loss = nn.functional.mse_loss(out.float(), x.square().mean(1, keepdim=True))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def parts(self) -> dict[str, nn.Module | optim.Optimizer | GradScaler]:
        """What a checkpoint holds, by name."""
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        first = Run()
        first.train(range(30))
        lucid.save({name: part.state_dict() for name, part in first.parts().items()}, path)
        print(f"saved after 30 steps at scale {first.scaler.get_scale():g}")
        second = Run()
        for name, state in lucid.load(path, map_location="metal").items():
            second.parts()[name].load_state_dict(state)
        print(f"loaded into a new run at scale {second.scaler.get_scale():g}")
    whole, resumed = first.train(range(30, 60)), second.train(range(30, 60))
    print(f"loss after 60 steps: {whole:.6f}, resumed {resumed:.6f}")
    equal = all(map(lucid.equal, first.model.state_dict().values(), second.model.state_dict().values()))
    print(f"the weights are equal bit for bit: {equal}")
