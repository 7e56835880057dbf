# SPDX-License-Identifier: Apache-2.0
"""The environment every test runs in; vLLM reads most of it once, when it is imported."""

import logging
import os

# Tests run side by side (Makefile) share out the cores, before anything starts a thread: two
# engines with threads on the same cores take more than twice as long as one.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    first, step = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first::step])

import pytest
from hypothesis import settings

from tests.fixtures.quick_start import sitecustomize

# Of this process, and by the variable of those that tests start.
QUICK_START = os.path.dirname(sitecustomize.__file__)

os.environ |= {
    "PYTHONPATH": os.pathsep.join(filter(None, (QUICK_START, os.environ.get("PYTHONPATH")))),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Either of these in a developer's shell would switch the plugin on, or off, behind a test's back.
os.environ.pop("VLLM_PLUGINS", None)
os.environ.pop("VLLM_TIERED_CONFIG", None)

# No deadline: the first example of a test pays for imports. A failure prints how to replay it. The
# same examples every time, so that what fails was caused by the change at hand; others are searched
# with --hypothesis-profile=search.
settings.register_profile("tiered", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True, derandomize=False)
settings.load_profile("tiered")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but the first variant of a test that starts engines."""
    seen = set()
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent.name == "e2e":
            test = (item.path, item.originalname)
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


@pytest.fixture
def caplog_vllm(caplog):
    """caplog for our log lines, whether or not vLLM's loggers hand records up to the root."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # A process's first engine would do it within the test, and take the handler away.
    configure_logging_if_needed(LoggingConfig())
    logger = logging.getLogger("vllm.tiered")
    before = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.level, logger.propagate = before
