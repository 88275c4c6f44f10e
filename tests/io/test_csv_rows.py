"""Columns as CSV."""

import numpy as np

from phasesplit.io import compression
from phasesplit.io.compression import csv_bytes


def test_floats_keep_every_bit_and_undefined_values_are_empty() -> None:
    """A reader would get rounded values, or nan and -1 where there is no value."""
    columns = {
        "s": np.array([1 / 3, 2.0, np.nan, 1e-300]),
        "machine": np.array([0, -1, 7, 2], np.int32),
        "status": np.array(["completed", "refused", "v1.0", ""]),
    }
    text = "s,machine,status\n0.3333333333333333,0,completed\n2,,refused\n,7,v1.0\n1e-300,2,\n"
    assert csv_bytes(columns) == text.encode()


def test_no_row_is_lost_between_parts() -> None:
    """Files longer than a part would lack rows, or have some twice."""
    count = 2 * compression._ROWS_AT_ONCE + 1
    lines = csv_bytes({"n": np.arange(count)}).decode().splitlines()
    assert lines[1:] == [str(number) for number in range(count)]
    assert csv_bytes({"n": np.arange(0)}) == b"n\n"
