"""A convolution net fed by worker processes, whose data set is a class of this very file."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Pictures of noise, labelled by their brightest quarter."""

    def __len__(self) -> int:
        return 144

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        quarters = picture.unfold(1, 4, 4).unfold(2, 4, 4).sum((-1, -2)).flatten()
        return picture, int(quarters.argmax())


if __name__ == "__main__":
    torch.manual_seed(7)
    loader = DataLoader(Squares(), batch_size=16, shuffle=True, num_workers=1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23, growth_interval=3)
    for x, y in loader:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
