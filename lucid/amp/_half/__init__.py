"""Half-precision arithmetic on processors without half-precision units.

Storage and rounding of half precision, arithmetic in float32: what a GPU does, half in, float32 accumulation,
one rounding out. The files, in the order in which they are best read::

    _operands.py      which arguments are cast, and what is cast once a scope
    _wide.py          float32 in between; an operator run once more to differentiate it
    _products.py      linear, matmul and the sums with a product
    _convolutions.py  convolutions and transposed convolutions
    _attention.py     scaled dot-product attention
    _recurrence.py    LSTM, GRU and simple recurrent networks
    _contractions.py  einsum and others that PyTorch makes of products
    _composites.py    functions that PyTorch composes in Python
    _processor.py     which arithmetic this processor is faster with
    _subnormals.py    half subnormals become zero, as on Metal
    _mode.py          the mode that sees every operator
    _checkpoint.py    recomputation in the arithmetic of the first computation
"""

from lucid.amp._half._checkpoint import checkpoint_contexts
from lucid.amp._half._mode import Settings, enter, is_on, leave

__all__ = ["Settings", "checkpoint_contexts", "enter", "is_on", "leave"]
