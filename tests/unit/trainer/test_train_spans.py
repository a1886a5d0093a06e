"""Spans have names under a profiler, and cost nothing without one."""

from gyre_trainer.comm.identity import name_modules, slice_span, span
from torch import nn
from torch.profiler import profile


def test_without_a_profiler_there_is_no_range() -> None:
    assert slice_span(nn.Linear(1, 1), "forward", 0, 0) is span("anything")


def test_a_profiler_sees_modules_by_path_once_they_are_named_and_by_class_before() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.GELU())
    with profile() as profiler:
        with slice_span(model[1], "forward", 3, 1):
            pass
        name_modules(model)
        with slice_span(model[0], "backward", 2, 0), span("waiting"):
            pass
    names = {event.key for event in profiler.key_averages()}
    assert {"GELU forward: slice 3, hop 1", "0 backward: slice 2, hop 0", "waiting"} <= names
