"""Import of TensorFlow without the log output of its libraries."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_tensorflow() -> Iterator[None]:
    """TensorFlow is imported without its log, unless TF_CPP_MIN_LOG_LEVEL asks for one.

    What its libraries log as they are loaded heeds no level, so that stderr itself is held back;
    if the import fails, it is shown.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
