"""Memory that streams still use when what holds it ends: after an error, or where no backward comes.

Torch's allocator gives freed memory to the next tensor of the stream that it was made on, at once. Who waits for all
that others do with a tensor may free it so, and that is how everything here ends well. What ends otherwise is freed by
whoever lets go of it last. Where garbage is collected that is any thread, with any current stream, at any moment: an
order of streams cannot be made up for there. The allocator is told instead which streams it has to ask first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def leave_to_streams(tensors: Iterable[torch.Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
    """Once freed, the memory of these tensors is nobody's before each stream is done with what it has to do by then.

    Not for what ends well: the host is ahead of the GPU, and would find memory of many layers not free yet.
    """
    for x in tensors:
        for stream in streams:
            x.record_stream(stream)
