"""``lucid-amp demo``: a network that learns in float16 with the scaler and not without, and why.

Knows the story's order and the options. Refuses to know how any of its parts is made: the task, the race,
the gradients' flow, the sawtooth, the screen, the picture and the words are files beside this one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from lucid._metal import real_device
from lucid.amp.cli import Refusal, require

PACKAGES = {"rich": "rich", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}

STEPS = 600
PATIENCE = 80.0
"""Seconds after which a default run is cut short, so that the demo ends within two minutes anywhere."""

PICTURE = "lucid-demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Teach the parser the demo's options."""
    parser.add_argument("--seed", type=_whole, default=0, help="of the initial weights (0)")
    parser.add_argument("--seeds", type=_counting, default=1, metavar="N", help="train on N seeds, from --seed on (1)")
    parser.add_argument(
        "--steps",
        type=_counting,
        help=f"training steps of each way ({STEPS}, cut short where that takes long)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or metal (cpu: the network is small)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="PLACE",
        help=f"a folder for {PICTURE}, or a .png file (out)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to standard error")


def run(args: argparse.Namespace) -> int:
    """Check everything, then train, show and explain.

    Returns:
        0; 1 where the picture could not be written after all; 130 after an interruption.

    Raises:
        Refusal: an extra is missing, the device does not work, or the picture cannot be written.
    """
    require(PACKAGES, extra="demo")
    device = _device(args.device)
    place = _writable(args.out)
    # Only now: these need the extra.
    from lucid.amp.cli.demo.screen import Screen
    from lucid.amp.cli.demo.story import tell

    screen = Screen(sys.stderr if args.json else sys.stdout)
    seeds = range(args.seed, args.seed + args.seeds)
    patience = PATIENCE if args.steps is None else None
    try:
        told = tell(screen, seeds, args.steps or STEPS, patience, device, place)
    except KeyboardInterrupt:
        screen.say("Interrupted; no picture was written.")
        return 130
    if args.json:
        print(json.dumps(told, allow_nan=False))
    return 0 if told["picture"] else 1


def _whole(text: str) -> int:
    return _number(text, at_least=0)


def _counting(text: str) -> int:
    return _number(text, at_least=1)


def _number(text: str, at_least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if not at_least <= number < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {at_least} to 2^32 - 1")
    return number


def _device(name: str) -> torch.device:
    """The device of that name, once a number could be put there and fetched again."""
    try:
        device = torch.device(real_device(name))
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise Refusal(f"--device {name!r}: {_first_sentence(error)}; --device cpu works everywhere") from None
    return device


def _writable(out: Path) -> Path:
    """The picture's path, in a folder that was made and can be written to."""
    place = out if out.suffix == ".png" else out / PICTURE
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        new = not place.exists()
        place.open("ab").close()
        if new:
            place.unlink()
    except OSError as error:
        raise Refusal(f"--out {out}: cannot write {place}: {error.strerror}; name a folder of your own") from None
    return place


def _first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0].partition(". ")[0].rstrip(".") if str(error) else type(error).__name__
