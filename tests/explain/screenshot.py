"""The README's picture of a report: `python -m tests.explain.screenshot` writes `notebooks/report.png`."""

import tempfile
import time
from pathlib import Path

from sharding.launch.config import Explain, ModelChoice
from sharding.launch.explain import complete
from tests import browser

PICTURE = Path(__file__).parents[2] / "notebooks" / "report.png"
PROGRAM = Explain(model=ModelChoice(name="gpt-7b"), mesh="data=8,fsdp=8,tensor=4", devices="v5p:4x8x8")
VALUE = "state/opt_state/1/0/mu/blocks/mlp/w1"


def main() -> None:
    completion = complete(PROGRAM)
    with tempfile.TemporaryDirectory() as folder, browser.chromium() as driver:
        path = completion.report(Path(folder) / "report.html")
        browser.shape(driver, 1280, 1060)
        driver.get(f"{path.as_uri()}#value={VALUE}")
        driver.execute_script("scrollTo(0, 0)")
        time.sleep(0.5)  # until it is drawn
        driver.save_screenshot(str(PICTURE))
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
