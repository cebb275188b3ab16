"""Makes the pictures of this folder from a working ring: `make images`. Needs Debian's chromium."""

import asyncio
import io
import re
import sys
import threading
import time
from pathlib import Path

from PIL import Image

from sluice import Client
from sluice.launch import Ring
from sluice.top.app import TopApp
from sluice.top.snapshot import combine, query
from tests.fakes.browser import CHROMIUM, browser
from tests.fakes.ports import start_with_metrics

FOLDER = Path(__file__).parent
WATCHED_SECONDS = 60.0
"""Seconds of load before the screenshots, so that the charts have some length."""
TENANTS = ("search", "search", "batch", "assistant", "batch", "assistant", "search")
SETTINGS = {"kv_cache_tokens": 2048}
COLOURS = 128
TOP_SECONDS = 25.0
WIDE, NARROW = (1280, 1400), (360, 1500)


def work(ring: Ring, number: int, stop: threading.Event) -> None:
    """Runs streams one after the other. Their prompts share a prefix, and their lengths differ."""
    tenant, turn = TENANTS[number], 0
    with Client(ring.address, tenant=tenant) as client:
        while not stop.is_set():
            turn += 1
            prompt = [*range(100, 160), *range(200 + 7 * number + turn % 5, 260)]
            name = f"{tenant}-{number}{turn:04}"
            with client.stream(prompt, request_id=name, max_tokens=80 + 40 * (turn % 7), ignore_eos=True) as stream:
                for _ in stream:
                    pass
            stop.wait(0.4 * (turn % 3))


def optimised(png: bytes) -> bytes:
    """Reduces the colours, since a page has few, which makes the file four times smaller."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


def status_pages(ring: Ring) -> None:
    address = f"http://127.0.0.1:{ring.plan.metrics_port}/"
    with browser() as chromium:
        pages = {
            f"status-{size}-{scheme}": chromium.page(address, *pixels, dark=scheme == "dark")
            for size, pixels in (("wide", WIDE), ("narrow", NARROW))
            for scheme in ("light", "dark")
        }
        time.sleep(WATCHED_SECONDS)
        for name, page in pages.items():
            (FOLDER / f"{name}.png").write_bytes(optimised(page.screenshot()))
            print(FOLDER / f"{name}.png")


async def top(ring: Ring) -> None:
    with Client(ring.address) as client:
        screen = TopApp(lambda: combine([query(client)]), 0.25)
        async with screen.run_test(size=(160, 38)) as pilot:
            await pilot.pause(TOP_SECONDS)
            picture = screen.export_screenshot(title="sluice top")
    # Its fonts would come from elsewhere; without them the reader's own are used.
    (FOLDER / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    print(FOLDER / "top.svg")


def main() -> None:
    if CHROMIUM is None:
        sys.exit("chromium is missing: apt-get install chromium-headless-shell")
    ring, stop = start_with_metrics(2, 2, engine_args=SETTINGS), threading.Event()
    try:
        workers = [threading.Thread(target=work, args=(ring, number, stop)) for number in range(len(TENANTS))]
        for worker in workers:
            worker.start()
        asyncio.run(top(ring))
        status_pages(ring)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        ring.stop()


if __name__ == "__main__":
    main()
