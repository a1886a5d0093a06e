"""How far a daemon is that measures the samples of a dataset, in words."""

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb


def measuring_line(state: pb.MeasuringState) -> str:
    """Returns a line such as `wiki: 1,200 of 40,000 samples (3.0%), 85/s, 456 s left`."""
    done, whole = state.num_done, max(state.num_samples, 1)
    line = (
        f"{printable(state.dataset)}: {done:,} of {counted(state.num_samples, 'sample', ',')} "
        f"({done / whole:.1%})"
    )
    num_new = done - state.num_reused
    if num_new <= 0 or state.elapsed_s <= 0:
        return line
    rate = num_new / state.elapsed_s
    left_s = max(state.num_samples - done, 0) / rate
    return f"{line}, {rate:,.0f}/s, {left_s:,.0f} s left"
