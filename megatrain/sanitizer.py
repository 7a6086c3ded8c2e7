"""torch's stream sanitizer (TORCH_CUDA_SANITIZER=1), for more threads than one.

It numbers launches and keeps what each stream knows of the others in plain dictionaries. Where threads take turns
within such an update, an access gets the number of another, and is told as a race that there is not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

MODULE = "torch.cuda._sanitizer"
TOLD_OF_SYNCHRONISING = (
    "record_state", "stream_wait_for_event", "all_streams_wait_for_event", "all_streams_wait_for_stream",
    "sync_all_streams",
)  # fmt: skip
_MAKING = threading.Lock()


def sanitized() -> AbstractContextManager[object]:
    """What a thread that launches enters, so that the sanitizer sees its launches; nothing where it is off.

    The module is not imported for it: that alone makes torch tell the sanitizer of every event and allocation, with a
    stack trace each, at several times the cost of an op.
    """
    module = sys.modules.get(MODULE)
    if module is None or not module.cuda_sanitizer.enabled:
        return nullcontext()
    dispatch: AbstractContextManager[object] = module.cuda_sanitizer.dispatch
    _one_at_a_time(dispatch)
    return dispatch


def _one_at_a_time(dispatch: Any) -> None:
    handler = dispatch.event_handler
    with _MAKING:
        if "_handle_kernel_launch" in vars(handler):  # done by a thread before
            return
        lock = threading.RLock()
        handler._handle_kernel_launch = _locked(handler._handle_kernel_launch, lock)
        for name in TOLD_OF_SYNCHRONISING:
            setattr(handler.syncs, name, _locked(getattr(handler.syncs, name), lock))


def _locked(function: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with lock:
            return function(*args)

    return call
