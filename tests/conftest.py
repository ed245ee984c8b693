"""All that tests need is in running.py. With xdist, the process that only hands them out leaves it: torch alone takes
seconds to import, and for these the workers wait. The conftest.py of a folder is read before: it imports no kernels."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("running")
