"""Known problems of Coral hosts: cause, fix, source, and the page of the manual that explains the hardware.

`doctor` shows this text when it finds the problem, and the pages in docs/hardware list the same text
(docs/draw_known_problems.py). It imports only the standard library.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

SEVERITIES = ("error", "warning", "note")
MANUAL = "docs/hardware/"
"""The folder of the pages."""
DRIVER_RELEASE = "github.com/feranick/gasket-driver/releases/tag/1.0-18.4"
LIBRARY_RELEASES = "github.com/feranick/libedgetpu/releases"
UDEV_RULES = "/etc/udev/rules.d/99-coral.rules"
USB_RULE = 'SUBSYSTEM=="usb", ATTRS{idVendor}=="1a6e|18d1", MODE="0660", GROUP="plugdev"'
PCI_RULE = 'SUBSYSTEM=="apex", MODE="0660", GROUP="apex"'
SET_PERFORMANCE = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_RELOAD = "sudo udevadm control --reload-rules && sudo udevadm trigger"
_EDGETPU = "https://github.com/google-coral/edgetpu/issues/"
_GASKET = "https://github.com/google/gasket-driver/"
_FRIGATE = "https://docs.frigate.video/troubleshooting/edgetpu/"


class Finding(NamedTuple):
    """A finding about a host.

    Attributes:
        severity: `error`: the Edge TPU or the runner does not work. `warning`: they may fail, or be slow. `note`:
            information.
        kind: an identifier for programs, stable across versions.
        what: the problem.
        why: the effect of the problem.
        hint: the command that fixes the problem; empty for some notes.
        page: the page of the manual that explains the problem, or empty.
    """

    severity: str
    kind: str
    what: str
    why: str
    hint: str = ""
    page: str = ""


class Problem(NamedTuple):
    """A known problem.

    Attributes:
        title: the problem as a user sees it, for the manual.
        why: cause and effect. Names in braces are replaced by the values of the finding.
        hint: the command that fixes the problem.
        kind: the `kind` of its findings, if that is not its name.
        page: the name of its page, without folder and ending.
    """

    title: str
    why: str
    hint: str
    sources: Tuple[str, ...] = ()
    kind: str = ""
    page: str = ""

    def finding(self, severity: str, what: str, **values: Any) -> Finding:
        """Return a finding of a severity in SEVERITIES, with the values of the names in braces."""
        texts = [self.why, self.hint]
        for name, value in values.items():
            texts = [text.replace("{%s}" % name, str(value)) for text in texts]
        return Finding(severity, self.kind, what, texts[0], texts[1], MANUAL + self.page + ".md")


def rule_command(rule: str) -> str:
    """Return the command that adds a udev rule and applies it."""
    return "echo '%s' | sudo tee -a %s && %s" % (rule, UDEV_RULES, _RELOAD)


INSTALL_PACKAGE = (
    "sudo apt-get install dkms && sudo apt-get install ./gasket-dkms_1.0-18.4_all.deb && sudo modprobe apex"
    "  # the file from " + DRIVER_RELEASE
)
INSTALL_FEDORA = (
    "sudo dnf copr enable kylegospo/google-coral-dkms"
    " && sudo dnf install kernel-devel-$(uname -r) gasket-dkms && sudo modprobe apex"
)
INSTALL_FEDORA_NEW = (
    "sudo dnf copr enable mwprado/cangaceiro && sudo dnf install akmod-gasket && sudo modprobe apex"
    "  # reported to work on Fedora 44"
)
NO_PACKAGE = (
    "uname -r  # no package builds for kernel 6.18 and newer without patches: start a kernel up to 6.17 and install the"
    " driver of the table in docs/hardware/pcie.md, or use a USB Accelerator, which needs no driver"
)
_SOFTWARE = {
    "too_new": Problem(
        "the process crashes (`Segmentation fault`) when it loads a compiled model",
        "with TFLite newer than 2.11.1, Google's libedgetpu 16.0 can crash the process",
        "sudo apt-get install ./libedgetpu1-std_16.0tf*.deb  # for this system, from " + LIBRARY_RELEASES,
        (
            _EDGETPU + "812",
            "https://github.com/tensorflow/tensorflow/issues/62371",
            "https://github.com/google-ai-edge/LiteRT/issues/3611",
        ),
    ),
    "library_version": Problem(
        "libedgetpu and the TFLite runtime have different TFLite versions",
        "near versions are reported to work together; after a crash, install the libedgetpu of the runtime's version",
        "apt list --installed 'libedgetpu*'; python3 -m pip list  # libedgetpu: " + LIBRARY_RELEASES,
        (_EDGETPU + "812", "https://github.com/feranick/pycoral/blob/master/README.md"),
    ),
    "library_missing": Problem(
        "`libedgetpu.so.1: cannot open shared object file`",
        "compiled models need libedgetpu; without it the int8 model runs on the CPU",
        "{install}",
        ("https://coral.ai/docs/accelerator/get-started/",),
    ),
    "musl": Problem(
        "Alpine Linux, or another system with musl",
        "libedgetpu and the TFLite runtimes are built for glibc and do not load with musl",
        "docker run debian:12-slim …  # use a system with glibc, such as Debian",
    ),
}
_USB = {
    "no_device": Problem(
        "`lsusb` shows neither 1a6e:089a nor 18d1:9302",
        "the int8 model runs on the CPU instead",
        "lsusb; lspci -n",
        (_FRIGATE, _EDGETPU + "675"),
    ),
    "udev_usb": Problem(
        "`Failed to load delegate`, although `lsusb` shows the stick, and `sudo` helps",
        "libedgetpu then finds no device, and gives no reason",
        rule_command(USB_RULE),
        ("https://github.com/feranick/libedgetpu/blob/master/debian/edgetpu-accelerator.rules",),
        kind="udev",
    ),
    "udev_usb_half": Problem(
        "the stick works once, and not again",
        "the id changes from 1a6e:089a to 18d1:9302 at first use, and both must be allowed",
        rule_command(USB_RULE),
        (_FRIGATE,),
        kind="udev",
    ),
    "permission_usb": Problem(
        "the user is not in the group `plugdev`",
        "libedgetpu then finds no device, and gives no reason",
        "sudo usermod -aG plugdev {user}  # and log in again",
        (_EDGETPU + "629",),
        kind="permission",
    ),
    "usb_2": Problem(
        "the stick is connected with 480 Mbit/s (`lsusb -t`)",
        "transfers take 3 to 10 times as long",
        "lsusb -t  # then use a blue port and a USB 3 cable",
        (_FRIGATE, "https://github.com/aallan/benchmarking-ml-on-the-edge"),
    ),
    "hub": Problem(
        "the stick is behind a hub",
        "it needs up to 900 mA; with less it disconnects during an inference",
        "lsusb -t  # then use a port of the board, or a powered hub",
        (_EDGETPU + "11",),
    ),
    "usb_current": Problem(
        "`USB transfer error`, or the stick disconnects, on a Raspberry Pi 5",
        "with a supply that does not offer 5 A, all USB ports together supply 600 mA; the Edge TPU needs up to 900 mA",
        "echo usb_max_current_enable=1 | sudo tee -a {config} && sudo reboot  # only with a supply of 5 V and 5 A",
        ("https://www.raspberrypi.com/documentation/computers/config_txt.html", _EDGETPU + "11"),
    ),
    "under_voltage": Problem(
        "`Under-voltage detected` in `dmesg`",
        "an Edge TPU on USB needs up to 900 mA and disconnects if the voltage drops; benchmarks vary",
        "vcgencmd get_throttled  # must print 0x0: use a stronger supply, and cool the board",
        (_EDGETPU + "754", _FRIGATE),
    ),
    "busy": Problem(
        "it works only while another program is stopped",
        "only one process at a time can use an Edge TPU",
        "kill {pid}",
        (_FRIGATE,),
    ),
}
_PCIE = {
    "no_driver": Problem(
        "`/dev/apex_0` is missing, and no driver is installed",
        "libedgetpu needs the kernel driver to reach it",
        "{install}",
        (_GASKET + "pull/50", _GASKET + "issues/55"),
    ),
    "not_built": Problem(
        "`Bad return status for module build on kernel`, also after an update of the kernel",
        "Google's gasket-dkms 1.0-18 (2022) does not build for kernel 6.4 and newer, and no package for Debian builds"
        " for 6.18 and newer",
        "{install}",
        (
            _GASKET + "issues/36",
            _GASKET + "issues/39",
            _GASKET + "pull/50",
            "https://github.com/KyleGospo/gasket-dkms/issues/25",
            "https://github.com/KyleGospo/gasket-dkms/issues/28",
        ),
    ),
    "headers": Problem(
        "the kernel's headers are missing, so that dkms cannot build the driver",
        "after each update of the kernel, dkms builds the driver again, and needs the headers of the new kernel",
        "{headers} && sudo dkms autoinstall && sudo modprobe apex",
        (_EDGETPU + "820", _EDGETPU + "223"),
    ),
    "not_loaded": Problem(
        "the driver is built, and not loaded",
        "libedgetpu needs the kernel driver to reach the Edge TPU",
        "sudo modprobe apex && ls -l /dev/apex_0",
        (_EDGETPU + "407",),
    ),
    "secure_boot": Problem(
        "`Key was rejected by service`: the driver is built, and Secure Boot refuses to load it",
        "with Secure Boot, the kernel loads only modules that are signed with an enrolled key",
        "sudo mokutil --import /var/lib/dkms/mok.pub && sudo reboot"
        "  # enroll the key at the start (Ubuntu: /var/lib/shim-signed/mok/MOK.der, akmods of Fedora:"
        " /etc/pki/akmods/certs/public_key.der)",
        (_GASKET + "issues/11", "https://wiki.debian.org/SecureBoot"),
    ),
    "appliance": Problem(
        "`/dev/apex_0` is missing on TrueNAS",
        "TrueNAS is an appliance: an update replaces the system, and with it a driver that you have built",
        "lspci -nn | grep 089a  # pass this card to a virtual machine that has the driver, or use a USB Accelerator",
        (_EDGETPU + "822",),
        kind="no_driver",
    ),
    "interrupts": Problem(
        "`Couldn't initialize interrupts: -524` in `dmesg` on a Raspberry Pi 5",
        "the driver needs more interrupts than the Pi 5 offers by default, and addresses of 32 bits",
        "printf 'dtoverlay=pciex1-compat-pi5,no-mip\\ndtoverlay=pcie-32bit-dma-pi5\\n' | sudo tee -a {config}"
        " && sudo reboot",
        (
            _FRIGATE,
            "https://github.com/raspberrypi/linux/pull/6126",
            "https://github.com/raspberrypi/linux/issues/6799",
            "https://github.com/raspberrypi/linux/issues/6214",
        ),
    ),
    "pages": Problem(
        "memory pages of 16 KiB (`getconf PAGESIZE`), the default of a Raspberry Pi 5",
        "the driver gasket, and libraries built for pages of 4 KiB, fail or do not load",
        "{fix}",
        (
            "https://github.com/geerlingguy/raspberry-pi-pcie-devices/issues/44",
            "https://github.com/raspberrypi/linux/pull/6126",
        ),
    ),
    "pcie_off": Problem(
        "`lspci` shows no 1ac1:089a on a Raspberry Pi 5",
        "the PCIe connector is off by default; only boards that identify themselves (HAT+) turn it on",
        "echo dtparam=pciex1 | sudo tee -a {config} && sudo reboot  # only if a card is connected",
        ("https://github.com/raspberrypi/linux/blob/rpi-6.12.y/arch/arm/boot/dts/overlays/README",),
    ),
    "driver_refuses": Problem(
        "the driver is loaded, and `/dev/apex_0` is missing",
        "libedgetpu needs the kernel driver to reach it",
        "sudo dmesg | grep -i apex  # the driver is loaded and refuses the device",
        (_EDGETPU + "343", _EDGETPU + "852"),
        kind="no_driver",
    ),
    "udev_pci": Problem(
        "`Permission denied` on `/dev/apex_0`, and no udev rule",
        "libedgetpu then finds no device, and gives no reason",
        "sudo groupadd -f apex && " + rule_command(PCI_RULE),
        ("https://coral.ai/docs/m2/get-started/",),
        kind="udev",
    ),
    "permission_pci": Problem(
        "the user is not in the group `apex`",
        "libedgetpu then finds no device, and gives no reason",
        "sudo usermod -aG apex {user}  # and log in again",
        ("https://coral.ai/docs/m2/get-started/",),
        kind="permission",
    ),
    "lost": Problem(
        "`/dev/apex_0` exists, and `lspci` no longer shows the card",
        "heat or low power made the device disappear",
        "sudo reboot",
        (_EDGETPU + "843",),
        kind="no_device",
    ),
    "dead": Problem(
        "`/sys/class/apex/apex_0/temp` is near -88000 (-89700)",
        "such a temperature means that the Edge TPU no longer responds",
        "sudo reboot",
        (_EDGETPU + "843",),
    ),
    "hot": Problem(
        "the Edge TPU has 85 degrees or more",
        "it is throttled, so benchmarks are not comparable",
        "watch cat /sys/class/thermal/thermal_zone*/temp  # cool it",
        ("https://github.com/google/gasket-driver/blob/main/src/apex_driver.c",),
    ),
}
_VIRTUAL = {
    "no_node": Problem(
        "`lsusb` in a container shows the stick, and its file in `/dev/bus/usb` is missing",
        "libedgetpu opens that file",
        "{fix}",
        (_FRIGATE, _EDGETPU + "715"),
    ),
    "not_passed": Problem(
        "`/dev/apex_0` exists on the host, and not in the container",
        "a container sees the card in /sys, but only the device files that it was given",
        "{fix}",
        (_FRIGATE, "https://github.com/blakeblackshear/frigate/issues/6331"),
    ),
    "firmware": Problem(
        "the stick is lost after the first inference in a container or a virtual machine",
        "the stick still has the id 1a6e:089a; at first use it loads its firmware, disconnects, and comes back as "
        "18d1:9302 with another device file, which must be passed on too",
        "{fix}",
        (_FRIGATE, _EDGETPU + "906", _EDGETPU + "872"),
    ),
    "no_device_container": Problem(
        "a container without an Edge TPU",
        "the int8 model runs on the CPU instead",
        "lsusb; lspci -n  # on the host; then pass /dev/bus/usb or /dev/apex_0 to the container",
        (_FRIGATE,),
        kind="no_device",
    ),
    "no_device_machine": Problem(
        "a virtual machine without an Edge TPU",
        "the int8 model runs on the CPU instead",
        "lsusb; lspci -n  # on the host; then pass the USB port, its controller, or the PCIe card to the machine",
        (_FRIGATE, _EDGETPU + "807"),
        kind="no_device",
    ),
    "no_device_wsl": Problem(
        "WSL 2 without an Edge TPU",
        "the int8 model runs on the CPU instead; WSL 2 sees no USB device that was not attached to it",
        "usbipd attach --wsl --busid BUSID --auto-attach  # on Windows, after `usbipd list` and `usbipd bind`",
        (_EDGETPU + "623",),
        kind="no_device",
    ),
    "vmware": Problem(
        "`MSI-X table init timed out` in `dmesg` in a virtual machine of VMware ESXi",
        "the card keeps its interrupt table in a memory page with other registers, which ESXi does not pass on",
        "lsusb  # use a USB Accelerator instead, or another hypervisor (KVM, Proxmox)",
        ("https://github.com/google-coral/libedgetpu/issues/48", _EDGETPU + "343"),
    ),
}
_DEV_BOARD = {
    "mini": Problem(
        "a Dev Board Mini takes 19 ms for a MobileNet",
        "the Edge TPU of a Dev Board Mini is connected with USB 2 on the board: transfers take 3 to 10 times as long",
        "",
        (_EDGETPU + "497", _EDGETPU + "593"),
        kind="usb_2",
    ),
    "clock": Problem(
        "`certificate is not yet valid` from apt or pip after the board was without power",
        "certificates are not valid yet, so downloads fail; logs have wrong times",
        "sudo timedatectl set-ntp true",
        (_EDGETPU + "581",),
    ),
}
_PAGES = (("index", _SOFTWARE), ("usb", _USB), ("pcie", _PCIE), ("virtual", _VIRTUAL), ("dev_board", _DEV_BOARD))
PROBLEMS: Dict[str, Problem] = {}
"""All known problems by name, in the order of the manual."""
for _page, _problems in _PAGES:
    for _name, _problem in _problems.items():
        PROBLEMS[_name] = _problem._replace(kind=_problem.kind or _name, page=_page)
