"""RowThreads: each row is computed once, by any number of threads."""

from threading import Event, get_ident

import pytest

from engine_worker.cpu_kernels import RowThreads


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
def test_each_row_is_computed_once(threads, rows):
    computed = []
    RowThreads(threads).run(lambda first, last: computed.extend(range(first, last)), rows)
    assert sorted(computed) == list(range(rows))


def test_parts_run_at_the_same_time():
    """The first part waits until the second has run in another thread."""
    here, done, parts = get_ident(), Event(), []

    def kernel(first, last):
        if first == 0:
            assert get_ident() == here
            assert done.wait(30)
        else:
            parts.append((first, last, get_ident()))
            done.set()

    RowThreads(2).run(kernel, 5)
    ((first, last, thread),) = parts
    assert (first, last) == (3, 5)
    assert thread != here


@pytest.mark.parametrize("failing", [0, 4])
def test_errors_are_raised_when_all_parts_are_done(failing):
    done = []

    def kernel(first, last):
        if first == failing:
            raise ValueError("no")
        done.append((first, last))

    with pytest.raises(ValueError, match="no"):
        RowThreads(3).run(kernel, 6)
    assert len(done) == 2
