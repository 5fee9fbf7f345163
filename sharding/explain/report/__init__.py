"""The HTML report of a completed program.

In: an assignment of specs and, optionally, the devices. Out: one self-contained HTML page, or an iframe of it.
"""

from .page import frame, page
from .page_data import contents

__all__ = ["contents", "frame", "page"]
