"""Headless Chromium driven by Selenium."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
"""From the Debian packages `chromium` and `chromium-driver`."""
FLAGS = """
--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-extensions --hide-scrollbars --force-color-profile=srgb
""".split()


def missing_programs() -> str:
    """Why no browser is available; empty if one is."""
    lacking = [name for name, path in PROGRAMS.items() if path is None]
    return f"no {' and no '.join(lacking)}: apt-get install chromium chromium-driver" if lacking else ""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with its own profile that records console messages."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(PROGRAMS["chromium"])
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(PROGRAMS["chromedriver"]))
        try:
            yield driver
        finally:
            driver.quit()


def set_viewport(driver: Any, width: int, height: int, *, scheme: str = "light", scale: int = 1) -> None:
    """Sets viewport size in pixels and colour scheme, with animations disabled."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
