"""Constants of the hosts pi4-usb3, pi5-usb3 and pi5-pcie: `python benchmarks/latency_raspberry_pi.py [--write]`.

Few measurements of Raspberry Pi boards are published (`raspberry_pi.csv`), so the other hosts' fit does not work here:

- pi4-usb3: the fixed time, the time of the bus and the factor of the array are fitted to the networks whose layers are
  known. The factor is 2.0: the clock is not stated, and was probably that of libedgetpu1-std, half of the maximum. The
  time of outputs is that of another ARM host on USB 3, a Jetson Nano (outputs alone were measured there).
- pi5-usb3: no network with known layers was measured. Four YOLOv8 networks were measured on both, at both clocks.
  The array takes twice as long at half the clock. So the time of transfers and the CPU is twice the time at the maximum
  clock, minus the time at half the clock. The constants of the Pi 4 are multiplied by the median ratio of these times.
  The array's factor is that of usb3, because the clock is stated.
- pi5-pcie: no measurement was found. The constants are between those of x86 hosts and of the Dev Board; the interval
  contains the predictions for both, and the measurements on a Compute Module 4.

The interval of all three is at least that of `usb2`, whose hosts are Raspberry Pis and Jetsons too. Prints a Markdown
table; `--write` puts the constants into the target file. Skipped without the shared layer tables (CORALLINE_SHARED).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import repository

from raspberry_pi_latency import TABLES, Constants, constants, measurements, predicted, transfer_ratios, with_constants

from compress.targets import edgetpu


def write(hosts: Mapping[str, Constants]) -> None:
    """Write the constants into the target file; its other lines do not change."""
    path = Path(edgetpu.__file__).with_name("edgetpu.toml")
    text = path.read_text()
    for host, values in hosts.items():
        begin = text.index(f"[latency.hosts.{host}]")
        head, tail = text[:begin], text[begin:]
        for name, value in values.items():
            tail = re.sub(rf"^{name} = [^\s#]+", f"{name} = {value:.3g}", tail, count=1, flags=re.MULTILINE)
        text = head + tail
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the constants into the target file")
    options = parser.parse_args()
    if repository.is_missing(TABLES):
        return
    hosts = constants()
    if options.write:
        write(hosts)
    print("| host | model | measured, ms | predicted, ms | interval, ms |")
    print("|---|---|---|---|---|")
    for host, source in (("pi4-usb3", "pi4-usb3"), ("pi5-pcie", "cm4-pcie")):
        for row in measurements(source):
            if row["table"]:
                expected = predicted(row["table"], with_constants(hosts[host]), row["clock"])
                name = host if host == source else f"{host} (measured on {source})"
                print(
                    f"| {name} | {row['model']} | {row['ms']} | {expected.total:.3g} | "
                    f"{expected.low:.3g} to {expected.high:.3g} |"
                )
    print(f"Pi 5 / Pi 4 without computation: {', '.join(f'{ratio:.2f}' for ratio in transfer_ratios())}")
    print(json.dumps(hosts, indent=1))


if __name__ == "__main__":
    main()
