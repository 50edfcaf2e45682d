"""``lucid-amp run train.py``: an existing script, unchanged, watched while it trains.

Knows the options and the order of things: check, watch, run, tell. Refuses to know how a script is started
(``_script``), what is noticed (``_notice``), what is written down (``_observer``) and how it is told (``report``).
"""

from __future__ import annotations

import argparse
import contextlib

from lucid.amp.cli import Refusal, report
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._log import Options
from lucid.amp.cli.run._observer import Observer
from lucid.amp.cli.run._script import Script

EVERY = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what may stand between ``run`` and the script; everything behind the script is the script's."""
    parser.usage = (
        "lucid-amp run [options] train.py [arguments]\n       lucid-amp run [options] -m package.module [arguments]"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the report goes; one that holds a run is gone on with "
        "(default: lucid-run, or the first of lucid-run-2, lucid-run-3, … that is unused)",
    )  # fmt: skip
    parser.add_argument(
        "--every", metavar="N", type=_positive, default=EVERY,
        help="sample the ranges of the gradients at one update in N (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--scaler", choices=("script", "lucid"), default="script",
        help="whose scaler does the work: the script's own, so that nothing changes, or lucid's in its place",
    )  # fmt: skip
    parser.add_argument("--no-watch", action="store_true", help="watch the scalers only, no module")
    parser.add_argument(
        "--no-replay", action="store_true", help="do not run a forward again to find where it stopped being finite"
    )
    parser.add_argument(
        "--keep", metavar="N", type=_positive,
        help="where gradients are accumulated: keep the inputs of the last N backward passes of an update, so that a "
        "forward among them can be run again (default: of all, the first ones as far as they take 256 MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--save-batch", action="store_true", help="keep the inputs at which the model failed, as batch.pt"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script; its exit status, exceptions and signals are this process's.

    Raises:
        Refusal: something is missing or wrong, told before the script starts.
    """
    script = Script.from_words(args.module or args.script, is_module=args.module is not None)
    report.check()
    folder = Folder.choose(args.out)
    options = Options(args.every, not args.no_watch, not args.no_replay, args.save_batch, args.keep)
    observer = Observer(script, folder, options)
    ending = ""
    try:
        with observer, _scaler_of(args.scaler):
            script.run()
        ending = "exit 0"
    except Refusal:
        folder.withdraw()
        raise
    except BaseException as error:
        ending = _ending(error)
        raise
    finally:
        # A child that the script forked comes here, too.
        if folder.is_mine() and ending:
            _tell(observer, ending)
    return 0


def _tell(observer: Observer, ending: str) -> None:
    """Write the last lines, draw, and sum up on standard error; the script's ending stays what it is."""
    folder = observer.folder
    try:
        observer.end(ending)
        if folder.rank == 0:
            report.sum_up(report.draw(folder.path), folder.path, observer.unsaved())
    except (Exception, KeyboardInterrupt) as error:
        report.say(f"lucid-amp run: the report could not be drawn ({type(error).__name__}: {error}).")
        report.say(f"What was recorded is in {folder.path}; lucid-amp report draws it again.")


def _ending(error: BaseException) -> str:
    """How the script ended, in a few words."""
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        return f"exit {code if isinstance(code, int) else 1}"
    return f"{type(error).__name__}: {error}".strip(": ")


def _scaler_of(choice: str) -> contextlib.AbstractContextManager[None]:
    if choice == "script":
        return contextlib.nullcontext()
    from lucid.amp.cli.run._adapter import swapped

    return swapped()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number
