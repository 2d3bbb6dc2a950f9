"""Settings for all tests: a busy machine must not fail a property for being slow, and every process of a test computes
with one thread, since two that share busy cores wait for each other in every operation (three times the time). Signals
that whoever started the tests ignores, as nohup and a shell's "&" do, would be ignored by the processes tested, too.
"""

import os
import signal

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("fivefold", deadline=None)
settings.load_profile("fivefold")
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
