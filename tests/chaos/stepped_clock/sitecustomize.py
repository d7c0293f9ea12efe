"""Loaded by the interpreters of a house whose clock is stepped by libfaketime.

Its version 0.9.10 takes the deadline that `time.sleep` gives the system, which is of the monotonic clock, for one
of the wall clock, and the sleep fails. A wait with a timeout is not touched by it.
"""

import threading
import time

time.sleep = lambda seconds: threading.Event().wait(seconds) and None
