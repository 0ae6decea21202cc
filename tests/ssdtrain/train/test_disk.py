"""The operating system's counters see what is written, and only then confirm."""

import os
from pathlib import Path

from ssdtrain.train.disk import Written, written

MIB = 1024 * 1024


def test_written_bytes_are_counted(tmp_path: Path) -> None:
    before = written((str(tmp_path),))
    with (tmp_path / "file").open("wb") as out:
        out.write(os.urandom(8 * MIB))
        out.flush()
        os.fsync(out.fileno())
    done = written((str(tmp_path),)).since(before)
    assert done.confirms(8 * MIB)
    assert done.process_bytes is None or not done._replace(device_bytes=None).confirms(
        9 * MIB
    )


def test_no_counter_confirms_nothing() -> None:
    assert not Written(None, None).confirms(1)
    assert Written(None, 5).since(Written(3, 2)) == Written(None, 3)
