"""How much chaos: the short form runs in `make test`, the whole one in `make chaos`."""

from __future__ import annotations

import os

WHOLE = os.environ.get("CHAOS") == "whole"

# Repeats a run that went wrong; each run prints its own.
SEED = int(os.environ.get("CHAOS_SEED", "0")) or None

HANG_UPS = 3000 if WHOLE else 150
HANG_UPS_AT_ONCE = 60
ANSWER_S_MAX = 1.0

KILLS = 100 if WHOLE else 4
KILLS_AFTER_DONE = 100 if WHOLE else 2
CLIENTS = 16 if WHOLE else 8
HOLD_S_MAX = 90

DRAINED_STREAMS = 30
DRAIN_S = 45 if WHOLE else 2

# In the short form the first token comes before a reaper has passed twice, and a dead process is settled
# for by its replacement; only the whole form waits for the reaper's own intervals.
# A stream may wait two minutes for its first token, a plain answer longer.
FIRST_TOKEN_S = 118 if WHOLE else 4
PLAIN_ANSWER_S = 125 if WHOLE else 4

CLOCK_STREAMS = 20
CLOCK_STEP_S = 2 * 3600
# Two passes of the reaper, which comes every 15 s, after each step.
CLOCK_STAY_S = 40 if WHOLE else 1.5
