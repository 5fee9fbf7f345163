"""Screenshot of a report for the README: `python -m tests.support.screenshot` writes `notebooks/report.png`."""

import tempfile
import time
from pathlib import Path

from sharding.launch.commands.explain import complete
from sharding.launch.config.explain_config import Explain
from sharding.launch.config.model_config import ModelOptions
from tests.support import browser

PICTURE = Path(__file__).parents[2] / "notebooks" / "report.png"
PROGRAM = Explain(model=ModelOptions(name="gpt-7b"), mesh="data=8,fsdp=8,tensor=4", devices="v5p:4x8x8")
VALUE = "state/opt_state/1/0/mu/blocks/mlp/w1"


def main() -> None:
    completion = complete(PROGRAM)
    with tempfile.TemporaryDirectory() as folder, browser.chromium() as driver:
        path = completion.report(Path(folder) / "report.html")
        browser.set_viewport(driver, 1280, 1060)
        driver.get(f"{path.as_uri()}#value={VALUE}")
        driver.execute_script("scrollTo(0, 0)")
        time.sleep(0.5)  # rendering
        driver.save_screenshot(str(PICTURE))
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
