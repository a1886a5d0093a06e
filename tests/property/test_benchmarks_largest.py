"""The deepest model within a budget is found from few counts, whatever a peak consists of."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rtp.largest import deepest

lines = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 100)), min_size=1, max_size=4)


@given(lines, st.integers(1, 5000))
def test_it_is_the_depth_that_a_search_of_all_finds(
    of_peak: list[tuple[int, int]], budget: int
) -> None:
    counted: list[int] = []

    def peak_of(depth: int) -> int:
        counted.append(depth)
        return max(at_zero + per_layer * depth for at_zero, per_layer in of_peak)

    found = deepest(peak_of, budget)
    assert len(counted) == len(set(counted)) <= 20
    fitting = [depth for depth in range(1, 5001) if peak_of(depth) <= budget]
    assert found == ((fitting[-1], peak_of(fitting[-1])) if len(fitting) > 1 else (0, 0))
