"""What float16 does to a model: causes told, modules watched, ranges measured.

    watching = diagnosis.watch(model, scaler)     # lucid's scaler or PyTorch's
    ...                                           # train
    print(diagnosis.explain(scaler))              # why was the last step skipped, and what to do?
    print(diagnosis.ranges(model, scaler))        # what float16 makes of the gradients

Knows how to look at a training. Never changes a parameter, a gradient or a scale.
"""

from lucid.amp.diagnosis._events import Handle, Listener, listen
from lucid.amp.diagnosis._explain import Explanation, explain
from lucid.amp.diagnosis._ranges import Ranges, ranges
from lucid.amp.diagnosis._watch import Watch, watch

__all__ = ["Explanation", "Handle", "Listener", "Ranges", "Watch", "explain", "listen", "ranges", "watch"]
