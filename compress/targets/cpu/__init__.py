"""The target `cpu`."""

from compress.targets.base import Target
from compress.targets.cpu.target import Cpu

TARGET: type[Target] = Cpu
